"""The decoder: one forward for prefill, decode and training.

What differs between the three is data: whether a cache comes in, whether guidance comes in
(training) or is recorded (rollout), whether a weight leaf is a master array or packed FP4.

The residual stream, norms, router, softmax and logits are float32; matrix products take operands in
the compute dtype. Layers are stacked and scanned, so compile time does not grow with depth; the
cache is carried through the scan and written in place.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import to_compute
from trace_jax.guidance.policy import NOTHING, Policy
from trace_jax.guidance.quantizer import Guide
from trace_jax.guidance.record import Guidance, Recording
from trace_jax.models.attention import Attention, RMSNorm
from trace_jax.models.cache import KVCache
from trace_jax.models.config import ModelConfig
from trace_jax.models.experts import Experts
from trace_jax.models.layer_context import EngineNoise, LayerContext
from trace_jax.models.parameters import parameter
from trace_jax.parallel.mesh import batch_shares


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What a forward returns."""

    logits: jax.Array  # float32 [B, T, V], or [B, V] where one position a sequence was asked for
    cache: KVCache | None  # with the new rows, where a cache came in
    recorded: tuple[Guidance, ...]  # one for each Recording asked for
    routes_LBTA: jax.Array  # int32, the routers' own choice of experts, replayed or not


class DecoderLayer(nn.Module):
    """One layer, in the form that a scan over layers wants: (carry, inputs) -> (carry, outputs)."""

    cfg: ModelConfig
    policy: Policy
    dtype: jnp.dtype
    records: tuple[Recording, ...]

    @nn.compact
    def __call__(self, carry, layer, replayed_BTA, positions_BT, guidance, noise):
        """((x float32 [B, T, D], cache), (recorded Guides, the router's own choice))."""
        cfg = self.cfg
        x_BTD, cache = carry
        context = LayerContext(self.policy, self.dtype, {}, False)
        if guidance is not None:
            context = dataclasses.replace(
                context,
                guides=guidance.at_layer(layer),
                guided=guidance.covers(layer, cfg.num_layers),
            )
        if noise is not None:
            noise = noise._replace(key=jax.random.fold_in(noise.key, layer))
            context = dataclasses.replace(context, noise=noise)
        norm = lambda name, x: RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, name=name)(x)
        y, cache, quantized = Attention(cfg, name="attention")(
            norm("input_norm", x_BTD), positions_BT, context, cache, layer
        )
        x_BTD = x_BTD + y
        y, routes_BTA, quantized_experts = Experts(cfg, name="experts")(
            norm("post_attention_norm", x_BTD), context, replayed_BTA
        )
        quantized |= quantized_experts
        recorded = tuple(record.encode(quantized) for record in self.records)
        return (x_BTD + y, cache), (recorded, routes_BTA)


class Decoder(nn.Module):
    """Embedding, scanned layers, final norm and head."""

    cfg: ModelConfig
    policy: Policy = NOTHING
    dtype: jnp.dtype = jnp.float32
    records: tuple[Recording, ...] = ()

    @nn.compact
    def __call__(
        self, tokens_BT, positions_BT, cache, guidance, routes_LBTA, at_B, noise
    ) -> Output:
        """The Output of tokens [B, T]; arguments as of `forward`."""
        cfg, normal = self.cfg, nn.initializers.normal(self.cfg.initializer_range)
        shape, axes = (cfg.vocab_size, cfg.hidden_size), ("vocab", "embed")
        table = parameter(self, "embed", shape, axes, normal)
        x_BTD = to_compute(table, self.dtype)[tokens_BT].astype(jnp.float32)
        layers = nn.scan(
            DecoderLayer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=cfg.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(cfg, self.policy, self.dtype, self.records, name="layers")
        (x_BTD, cache), (recorded, routes) = layers(
            (x_BTD, cache), jnp.arange(cfg.num_layers), routes_LBTA, positions_BT, guidance, noise
        )
        if at_B is not None:
            x_BTD = jnp.take_along_axis(x_BTD, at_B[:, None, None], axis=1)[:, 0]
        x_BTD = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, name="final_norm")(x_BTD)
        head = parameter(self, "head", shape, axes, normal)
        head = to_compute(head, self.dtype).astype(jnp.float32)
        logits = jnp.einsum("...D,VD->...V", x_BTD, head)
        recorded = tuple(map(keep_layers, self.records, recorded))
        return Output(logits, cache, recorded, routes)


def keep_layers(record: Recording, guides: dict[str, Guide]) -> Guidance:
    """The Guidance of the recorded layers, from Guides [L, B, T, ...] of all."""
    kept = jax.tree.map(lambda a: a[record.first_layer : record.last_layer], guides)
    return Guidance(kept, record.first_layer, record.last_layer)


def init(cfg: ModelConfig, key: jax.Array) -> dict:
    """Master parameters, float32, layers stacked on a leading axis."""
    return nn.unbox(_init(cfg, key))


def logical_axes(cfg: ModelConfig) -> dict:
    """The tree of parameters with each leaf's logical axes, a tuple of names."""
    boxed = jax.eval_shape(lambda key: _init(cfg, key), jax.random.key(0))
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    return jax.tree.map(lambda leaf: tuple(leaf.names), boxed, is_leaf=is_box)


def _init(cfg, key):
    tokens = jnp.zeros((batch_shares(), 1), jnp.int32)
    return Decoder(cfg).init(key, tokens, tokens, None, None, None, None, None)["params"]


def forward(
    params: dict,
    tokens_BT: jax.Array,
    cfg: ModelConfig,
    *,
    policy: Policy = NOTHING,
    dtype: jnp.dtype | None = None,
    positions_BT: jax.Array | None = None,
    cache: KVCache | None = None,
    guidance: Guidance | None = None,
    routes_LBTA: jax.Array | None = None,
    records: tuple[Recording, ...] = (),
    at_B: jax.Array | None = None,
    noise: EngineNoise | None = None,
) -> Output:
    """Logits of tokens int32 [B, T], and what else was asked for.

    policy: sites to quantize (none by default); dtype: compute dtype (default: that of the
    embedding); positions_BT: default 0..T-1; cache: attend over it after writing these tokens at
    their positions; guidance, routes_LBTA: a rollout's record to follow; records: what to keep of
    this forward's own rounding; at_B: return logits at this token index of each sequence only;
    noise: emulate another engine's kernels.

    Raises ValueError where a record names a site that the policy does not quantize, and for
    guidance of the experts' hidden rows without the routes that say whose rows they are.
    """
    for record in records:
        if set(record.sites) - set(policy.sites):
            raise ValueError(
                f"recording {record.sites} needs these sites quantized; policy has {policy.sites}"
            )
    if guidance is not None and "experts/mid" in guidance.guides and routes_LBTA is None:
        raise ValueError(
            "guidance of 'experts/mid' lies in the order of the rollout's routes: replay them "
            "(routes_LBTA), or leave this site out of the record"
        )
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    dtype = params["embed"].dtype if dtype is None else dtype
    model = Decoder(cfg, policy, jnp.dtype(dtype), records)
    return model.apply(
        {"params": params}, tokens_BT, positions_BT, cache, guidance, routes_LBTA, at_B, noise
    )

