"""A dense checkpoint becomes a mixture of experts, so that real activations pass the experts' path.

    dense:  y = sum_f down[:, f] h_f          h_f = silu(gate_f x) (up_f x)
    copy:   every expert is the whole block; the chosen weights sum to 1, so y stays the same
    split:  expert e has the hidden units of its slice, its down projection times k, the number of
            experts chosen; at equal weights 1/k, y is the sum over the chosen slices

Split over all experts (k = num_experts) with a router of zeros is the dense model; with fewer, each
chosen hidden unit counts as in the dense model, and the others are left out: too much to answer
anything before it is trained (SmolLM2, 3 of 4). Slices are contiguous, so FP4 blocks of the down
projection stay as they were.

The router is drawn at random: small values, so that weights are near 1/k, not zeros, by which all
tokens would go to the first experts. Training makes it a router. Source: data.md section 3, sparse
upcycling (arXiv 2212.05055).

Letters: L layers of a segment, D model, F hidden units, E experts.
"""

import dataclasses

import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import BlockScaled, Operand
from trace_jax.models import architecture
from trace_jax.models.architecture import ModelConfig

WAYS = ("copy", "split")


def upcycle(
    params: dict,
    cfg: ModelConfig,
    num_experts: int,
    num_experts_per_token: int,
    how: str = "copy",
    key: jax.Array | None = None,
    router_std: float = 0.02,
) -> tuple[dict, ModelConfig]:
    """(parameters, sizes) of a mixture made of a dense model; every other leaf is the same array.

    `key` draws the router (default: jax.random.key(0)); `router_std` is its standard deviation.

    Raises ValueError for a model that has experts already, packed weights, an unknown `how`, a
    number of experts that does not divide the hidden units, or more chosen than there are.
    """
    if cfg.num_experts:
        raise ValueError(f"model.num_experts={cfg.num_experts}: only a dense model is upcycled")
    if how not in WAYS:
        raise ValueError(f"how={how!r}: choose one of {WAYS}")
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts}: must be 1 or more")
    if how == "split" and cfg.intermediate_size % num_experts:
        raise ValueError(
            f"num_experts={num_experts} does not divide model.intermediate_size="
            f"{cfg.intermediate_size}, which is split among them; fix: choose a divisor of it"
        )
    parts = num_experts if how == "split" else 1
    new_cfg = dataclasses.replace(
        cfg,
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        moe_intermediate_size=cfg.intermediate_size // parts,
        intermediate_size=0,
        norm_topk_prob=True,  # copies add up to one only so
    )
    key = jax.random.key(0) if key is None else key
    new_params = dict(params)
    for segment in architecture.segments(cfg):
        layers = {}
        for position, layer in params[segment.name].items():
            own = jax.random.fold_in(key, segment.first + int(position))
            experts = _experts(layer["mlp"], new_cfg, how)
            gate_up = experts["gate_up"]
            normal = jax.random.normal(own, (*gate_up.shape[:2], cfg.hidden_size))
            experts["router"] = (router_std * normal).astype(gate_up.dtype)
            others = {name: leaf for name, leaf in layer.items() if name != "mlp"}
            layers[position] = others | {"experts": experts}
        new_params[segment.name] = layers
    return new_params, new_cfg


def _experts(mlp: dict, cfg: ModelConfig, how: str) -> dict[str, jax.Array]:
    """Leaves [L, E, ...] of stacked dense ones: gate_up [L, 2F, D] and down [L, D, F]."""
    for name, leaf in mlp.items():
        if isinstance(leaf, BlockScaled | Operand):
            raise ValueError(
                f"mlp/{name} is a {type(leaf).__name__}: upcycle masters, and pack the result"
            )
    E = cfg.num_experts
    L, D, F = mlp["down"].shape
    if how == "copy":
        return {
            name: jnp.broadcast_to(leaf[:, None], (L, E, *leaf.shape[1:]))
            for name, leaf in mlp.items()
        }
    gate_up = mlp["gate_up"].reshape(L, 2, E, F // E, D).swapaxes(1, 2)
    down = mlp["down"].reshape(L, D, E, F // E).swapaxes(1, 2)
    return {
        "gate_up": gate_up.reshape(L, E, 2 * F // E, D),
        "down": down * cfg.num_experts_per_token,
    }
