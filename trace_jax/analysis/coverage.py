"""What a policy puts in FP4: the share of a model's parameters, weight bytes, FLOPs and KV bytes.

Sizes are read off the shapes of what a rollout really holds (packed weights, KV cache), so they
cannot drift from the model. Nothing is allocated: a 235B model takes a second.
"""

import dataclasses

import jax
import jax.numpy as jnp

from trace_jax.formats import e2m1
from trace_jax.formats.block_scaled import FORMATS
from trace_jax.guidance.policy import NOTHING, STATE, UNQUANTIZED, WEIGHT_SITE, Policy
from trace_jax.models import architecture, cache, decoder, packing
from trace_jax.models.architecture import ATTENTION, DELTA_NET, ModelConfig

# Parameters outside every site, by leaf or by module -> what the table calls them.
OUTSIDE = {
    "scale": "norms",
    "router": "router",
    "gate": "shared expert's gate",
    "delta_net": "DeltaNet, small",
    "indexer": "indexer",
    "mixer_connection": "hyper-connections",
    "feed_forward_connection": "hyper-connections",
    "final_mixer": "hyper-connections",
    "table": "n-gram table",
    "ngram": "n-gram embedding",
    "embed": "embedding",
}
LOOKED_UP = ("embed", "scale", "table", "A_log", "dt_bias")  # in no product
ROUTED = ("experts/gate_up", "experts/down")  # a token multiplies its chosen experts only


@dataclasses.dataclass(frozen=True)
class Part:
    """One site, or one kind of parameter outside the sites, summed over layers."""

    name: str
    fmt: str  # of its weights, or of what no weight multiplies: a format, "bf16" or "float32"
    parameters: int = 0  # weights, all experts
    weight_bytes: int = 0  # of those in a rollout; FP4 with block scales and outer scales
    flops: int = 0  # matrix products of one token at decode, a multiply-add as 2
    input: str = ""  # the format of the activations that the weights multiply, where another one

    def in_fp4(self, quantity: str) -> bool:
        """Whether it counts as FP4: its weights, and for "flops" their input too."""
        operands = (self.fmt, self.input or self.fmt) if quantity == "flops" else (self.fmt,)
        return all(fmt in FORMATS and FORMATS[fmt].element is e2m1 for fmt in operands)

    @property
    def formats(self) -> str:
        """Its formats as the table shows them."""
        return f"{self.fmt} x {self.input}" if self.input else self.fmt


@dataclasses.dataclass(frozen=True)
class Coverage:
    """What is in FP4, part by part: the model's sites in order, then what lies outside."""

    parts: tuple[Part, ...]
    kv_length: int  # positions attended, tokens
    kv_bytes_per_token: int  # K and V (and index keys) of all layers, with scales
    kv_bytes_per_token_bf16: int  # the same, nothing quantized
    state_bytes: int  # recurrent state and tails of one sequence, whatever its length

    def total(self, quantity: str) -> int:
        """The sum over parts of "parameters", "weight_bytes" or "flops"."""
        return sum(getattr(part, quantity) for part in self.parts)

    def share(self, quantity: str) -> float:
        """The share in FP4 (0 to 1) of "parameters", "weight_bytes" or "flops"."""
        fp4 = sum(getattr(part, quantity) for part in self.parts if part.in_fp4(quantity))
        return fp4 / self.total(quantity)

    @property
    def weight_bytes_bf16(self) -> int:
        """Bytes that the weights would take if all were BF16."""
        return 2 * self.total("parameters")


def coverage(policy: Policy, cfg: ModelConfig, kv_length: int) -> Coverage:
    """The Coverage of a rollout in BF16 compute, whose tokens attend to `kv_length` positions.

    A product is FP4 where weights and input are. Scores count as FP4 where K is and the weighted
    sum where V is, though queries and probabilities stay BF16. Element-wise work is not counted.
    Raises ValueError for kv_length below 1 or a width that a block does not divide.
    """
    if kv_length < 1:
        raise ValueError(f"kv_length={kv_length}: must be at least 1, the token itself")

    def part(site):
        own = policy.fmt(site) or ("float32" if site == STATE else UNQUANTIZED)
        weights = dict(policy.weights).get(site, UNQUANTIZED if site in multiplied else own)
        return Part(site, weights, input=own if own != weights else "")

    multiplied = set(WEIGHT_SITE.values())
    parts = {site: part(site) for site in architecture.sites(cfg)}

    masters = jax.eval_shape(lambda key: decoder.init(cfg, key), jax.random.key(0))
    packed = jax.eval_shape(lambda params: packing.pack(params, policy, jnp.bfloat16), masters)
    rollout_leaves = jax.tree.leaves(packed, is_leaf=packing.is_packed)
    named = jax.tree.leaves_with_path(masters)
    for (path, master), leaf in zip(named, rollout_leaves, strict=True):
        weight, own = packing.weight_name(path), path[-1].key
        name = WEIGHT_SITE.get(weight) or OUTSIDE.get(own) or OUTSIDE[path[-2].key]
        fmt = policy.weight_fmt(weight)
        if fmt is None:
            fmt = "float32" if own in packing.FLOAT32 else UNQUANTIZED
        used = 0 if own in LOOKED_UP else master.size
        if weight in ROUTED:
            used = used // cfg.num_experts * cfg.num_experts_per_token
        parts[name] = _add(parts.get(name, Part(name, fmt)), master.size, _bytes(leaf), 2 * used)

    attention, delta = (len(architecture.layers_with(cfg, m)) for m in (ATTENTION, DELTA_NET))
    for site in ("attention/k", "attention/v") if attention else ():
        products = 2 * attention * cfg.num_heads * cfg.head_dim * kv_length
        parts[site] = _add(parts[site], flops=products)
    if delta:  # read by the key, written, read by the query
        products = 3 * 2 * delta * cfg.delta_net.value_width * cfg.delta_net.key_head_dim
        parts[STATE] = _add(parts[STATE], flops=products)

    inside = [name for name in parts if name not in OUTSIDE.values()]
    outside = [name for name in dict.fromkeys(OUTSIDE.values()) if name in parts]
    in_order = tuple(parts[name] for name in (*inside, *outside))
    kv_bytes, state_bytes = _cache_bytes(policy, cfg)
    return Coverage(in_order, kv_length, kv_bytes, _cache_bytes(NOTHING, cfg)[0], state_bytes)


def table(of: Coverage) -> str:
    """The coverage as plain text to print at start: a line a part, totals, and bytes saved."""
    quantities = ("parameters", "weight_bytes", "flops")
    rows = [("site", "format", "parameters", "weight bytes", "FLOPs a token")]
    rows += [
        (part.name, part.formats, *(_short(getattr(part, name)) for name in quantities))
        for part in of.parts
    ]
    rows.append(("all", "", *(_short(of.total(name)) for name in quantities)))
    rows.append(("share in FP4", "", *(f"{of.share(name):.1%}" for name in quantities)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    weights, kv = of.total("weight_bytes"), of.kv_bytes_per_token
    lines += [
        f"weights: {weights:,} B, {weights / of.weight_bytes_bf16:.3f} of BF16",
        f"KV cache: {kv:,} B a token, {kv / of.kv_bytes_per_token_bf16:.3f} of BF16",
        *([f"recurrent state: {of.state_bytes:,} B a sequence"] if of.state_bytes else []),
        f"FLOPs: those of decode, {of.kv_length:,} positions attended",
    ]
    return "\n".join(lines)


def _add(part: Part, parameters: int = 0, weight_bytes: int = 0, flops: int = 0) -> Part:
    return dataclasses.replace(
        part,
        parameters=part.parameters + parameters,
        weight_bytes=part.weight_bytes + weight_bytes,
        flops=part.flops + flops,
    )


def _cache_bytes(policy: Policy, cfg: ModelConfig) -> tuple[int, int]:
    """Bytes of one token's keys and values in all layers, and of one sequence's recurrent state."""
    held = jax.eval_shape(lambda: cache.empty(cfg, policy, 1, 1, jnp.bfloat16))
    return _bytes((held.k, held.v, held.index_keys)), _bytes((held.delta, held.ngram))


def _bytes(tree) -> int:
    """Bytes of the arrays of a tree of shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _short(value: float) -> str:
    """The value to three digits with a decimal prefix: 1.23M."""
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g}{prefix}"
        value /= 1000
    return f"{value:.3g}T"
