"""What a model is made of: its sizes, which blocks each layer has, and where a layer's leaves lie.

Values and meanings: released config files, as listed in reference/qwen.md sections 1 and 2.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

ATTENTION, DELTA_NET = "attention", "delta_net"


def check_sizes(section: object, prefix: str, may_be_zero: tuple[str, ...] = ()) -> None:
    """Raises ValueError naming the first integer field that is no positive integer."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        least = 0 if field.name in may_be_zero else 1
        if field.type in (int, "int") and (type(value) is not int or value < least):
            rule = "a positive integer" if least else "an integer, 0 or more"
            raise ValueError(f"{prefix}{field.name}={value!r}: must be {rule}")


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of the Gated DeltaNet layers (qwen.md 2.4)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int = 4  # tokens that the short convolution reads
    gate: str = "silu"  # of the output norm: "silu" or "sigmoid"

    def __post_init__(self):
        check_sizes(self, "model.delta_net.")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"model.delta_net.num_value_heads={self.num_value_heads} is not a multiple of "
                f"num_key_heads={self.num_key_heads}; value heads share key heads evenly"
            )
        if self.gate not in ("silu", "sigmoid"):
            raise ValueError(f"model.delta_net.gate={self.gate!r}: choose 'silu' or 'sigmoid'")

    @property
    def key_width(self) -> int:
        """Values of all key heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Values of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width


@dataclasses.dataclass(frozen=True)
class HyperConnectionConfig:
    """Residual streams in place of one residual and its norms (qwen.md 2.7)."""

    streams: int
    rank: int  # of the low-rank map that mixes them

    def __post_init__(self):
        check_sizes(self, "model.hyper_connection.")


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """Sparse attention: which blocks of tokens a query reads (QSA, qwen.md 2.7)."""

    num_heads: int
    head_dim: int
    budget: int  # tokens
    block: int  # tokens a block

    def __post_init__(self):
        check_sizes(self, "model.indexer.")
        if self.budget % self.block:
            raise ValueError(
                f"model.indexer.budget={self.budget} is not a multiple of block={self.block}"
            )


@dataclasses.dataclass(frozen=True)
class NgramConfig:
    """The hashed n-gram embedding (PLE, qwen.md 2.7)."""

    layers: tuple[int, ...]  # that have one, counted from 0
    size: int  # longest n-gram, tokens
    heads_per_ngram: int
    embed_dim: int  # of all heads together
    vocab_size_base: int  # the primes that hashes are reduced by begin here
    divisible_by: int  # the table's rows are padded to a multiple
    seed: int
    eos_id: int  # n-grams do not reach across it
    conv_size: int = 4

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(sorted(self.layers)))
        check_sizes(self, "model.ngram.", may_be_zero=("seed", "eos_id"))
        if not self.layers or min(self.layers) < 0:
            raise ValueError(f"model.ngram.layers={self.layers}: name layers, counted from 0")
        if self.size < 2:
            raise ValueError(f"model.ngram.size={self.size}: an n-gram has two tokens or more")
        if self.embed_dim % self.heads:
            raise ValueError(
                f"model.ngram.embed_dim={self.embed_dim} does not split over {self.heads} heads"
            )

    @property
    def heads(self) -> int:
        """Table rows that a token reads: heads_per_ngram for each n from 2 to size."""
        return self.heads_per_ngram * (self.size - 1)

    @property
    def row_width(self) -> int:
        """Values of one row of the table."""
        return self.embed_dim // self.heads


PARTS = {
    "delta_net": DeltaNetConfig,
    "hyper_connection": HyperConnectionConfig,
    "indexer": IndexerConfig,
    "ngram": NgramConfig,
}


class LayerKind(NamedTuple):
    """Which blocks a layer has; every layer also has its feed-forward block."""

    mixer: str  # ATTENTION or DELTA_NET
    ngram: bool


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layers that repeat one group; scanned over the repeats."""

    first: int  # its first layer
    kinds: tuple[LayerKind, ...]  # of the layers of one group
    repeats: int

    @property
    def name(self) -> str:
        """Its key in the parameter tree."""
        return f"layers_{self.first}"

    def layers_at(self, position: int) -> tuple[int, ...]:
        """The layers that stand at a position of the group, one a repeat."""
        group = len(self.kinds)
        return tuple(range(self.first + position, self.first + group * self.repeats, group))


class Place(NamedTuple):
    """Where a layer's parameters lie: params[segment][position][...leaf][repeat]."""

    segment: str
    position: str
    repeat: int


class Site(NamedTuple):
    """What a quantization site of guidance/policy.py is in one model."""

    layers: tuple[int, ...]  # that have it
    width: int  # of its last axis, the blocked one
    key: str  # the sizes that make the width
    rows: int = 1  # that a token has of it


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. Raises ValueError when they do not fit together.

    Experts: `num_experts` of `moe_intermediate_size` each, or, where num_experts is 0, one dense
    block of `intermediate_size`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    intermediate_size: int = 0
    shared_expert_size: int = 0  # 0: no shared expert
    rope_theta: float = 1e6
    rotary_fraction: float = 1.0  # of each head that rotates
    rms_norm_eps: float = 1e-6
    norm_topk_prob: bool = True
    initializer_range: float = 0.02
    qk_norm: bool = True
    attention_gate: bool = False  # sigmoid gate on the attention output
    zero_centered_norms: bool = False  # (1 + w) x in place of w x
    tie_embeddings: bool = False
    layer_pattern: tuple[str, ...] = (ATTENTION,)  # mixers, repeated over the layers
    delta_net: DeltaNetConfig | None = None
    hyper_connection: HyperConnectionConfig | None = None
    indexer: IndexerConfig | None = None
    ngram: NgramConfig | None = None

    def __post_init__(self):
        object.__setattr__(self, "layer_pattern", tuple(self.layer_pattern))
        for name, kind in PARTS.items():
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                object.__setattr__(self, name, part(kind, dict(given), f"model.{name}"))
        absent = ("intermediate_size", "shared_expert_size")
        if self.num_experts == 0:
            absent = ("num_experts", "num_experts_per_token", "moe_intermediate_size", absent[1])
        check_sizes(self, "model.", absent)
        for name in ("rope_theta", "rms_norm_eps", "initializer_range", "rotary_fraction"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"model.{name}={value!r}: must be a number above 0")
        if self.num_experts and self.intermediate_size:
            raise ValueError(
                f"model.intermediate_size={self.intermediate_size} is that of a dense model, but "
                f"model.num_experts={self.num_experts}; set one of them to 0"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}; query heads share KV heads evenly"
            )
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"model.num_experts_per_token={self.num_experts_per_token} exceeds "
                f"model.num_experts={self.num_experts}"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"model.head_dim={self.head_dim}: rotary embedding needs an even size, but "
                f"rotary_fraction={self.rotary_fraction} of it is {self.rotary_dim}"
            )
        unknown = set(self.layer_pattern) - {ATTENTION, DELTA_NET}
        if unknown or not self.layer_pattern:
            raise ValueError(
                f"model.layer_pattern={self.layer_pattern}: name {ATTENTION!r} or {DELTA_NET!r}"
            )
        if (DELTA_NET in self.mixers) != (self.delta_net is not None):
            raise ValueError(
                f"model.layer_pattern={self.layer_pattern} of {self.num_layers} layers and "
                "model.delta_net: give the sizes just where the pattern has such layers"
            )
        if self.ngram and max(self.ngram.layers, default=0) >= self.num_layers:
            raise ValueError(
                f"model.ngram.layers={self.ngram.layers} of a model of {self.num_layers} layers"
            )
        if self.indexer and self.rotary_dim > self.indexer.head_dim:
            raise ValueError(
                f"model.indexer.head_dim={self.indexer.head_dim} is less than the "
                f"{self.rotary_dim} values of a head that rotate; lower model.rotary_fraction"
            )
        if self.ngram and not self.hyper_connection:
            raise ValueError("model.ngram writes to residual streams: set model.hyper_connection")

    @property
    def rotary_dim(self) -> int:
        """Values of each head that rotate."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixer of each layer."""
        repeated = itertools.cycle(self.layer_pattern)
        return tuple(itertools.islice(repeated, self.num_layers))


def part(kind: type, given: Mapping[str, Any], key: str) -> Any:
    """The dataclass `kind` of a mapping. Raises ValueError naming missing and unknown fields."""
    fields = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(kind)}
    missing = [name for name, required in fields.items() if required and name not in given]
    unknown = sorted(set(given) - set(fields))
    if missing or unknown:
        raise ValueError(
            f"{key}: missing {missing}, unknown {unknown}; its fields are {list(fields)}"
        )
    return kind(**dict(given))


@functools.cache
def segments(cfg: ModelConfig) -> tuple[Segment, ...]:
    """The layers as runs of equal groups, each group one round of the layer pattern."""
    ngram = cfg.ngram.layers if cfg.ngram else ()
    kinds = [LayerKind(mixer, layer in ngram) for layer, mixer in enumerate(cfg.mixers)]
    size = len(cfg.layer_pattern)
    groups = [tuple(kinds[i : i + size]) for i in range(0, len(kinds), size)]
    found, first = [], 0
    # Groups with an n-gram embedding stay apart: each has its own primes, so tables do not stack.
    alone = lambda numbered: numbered[0] if any(kind.ngram for kind in numbered[1]) else -1
    for (_, group), run in itertools.groupby(
        enumerate(groups), key=lambda numbered: (alone(numbered), numbered[1])
    ):
        found.append(Segment(first, group, repeats=len(list(run))))
        first += len(group) * found[-1].repeats
    return tuple(found)


@functools.cache
def places(cfg: ModelConfig) -> tuple[Place, ...]:
    """The Place of each layer."""
    found = {}
    for segment in segments(cfg):
        for position in range(len(segment.kinds)):
            for repeat, layer in enumerate(segment.layers_at(position)):
                found[layer] = Place(segment.name, f"{position}", repeat)
    return tuple(found[layer] for layer in range(cfg.num_layers))


def layers_with(cfg: ModelConfig, mixer: str) -> tuple[int, ...]:
    """The layers that have a mixer."""
    return tuple(layer for layer, found in enumerate(cfg.mixers) if found == mixer)


@functools.cache
def sites(cfg: ModelConfig) -> dict[str, Site]:
    """The quantization sites (guidance/policy.py) of a model; the head is the last layer's."""
    attention, delta = (layers_with(cfg, mixer) for mixer in (ATTENTION, DELTA_NET))
    every, last = tuple(range(cfg.num_layers)), (cfg.num_layers - 1,)
    hidden = (cfg.hidden_size, "hidden_size")
    found = {}
    if attention:
        found["attention/in"] = Site(attention, *hidden)
        found["attention/k"] = Site(attention, cfg.head_dim, "head_dim", cfg.num_kv_heads)
        found["attention/v"] = Site(attention, cfg.head_dim, "head_dim", cfg.num_kv_heads)
        heads = cfg.num_heads * cfg.head_dim
        found["attention/out"] = Site(attention, heads, "num_heads * head_dim")
    if delta:
        values, one = cfg.delta_net.value_width, cfg.delta_net.value_head_dim
        found["delta_net/in"] = Site(delta, *hidden)
        found["delta_net/state"] = Site(delta, one, "delta_net.value_head_dim")
        key = "delta_net.num_value_heads * delta_net.value_head_dim"
        found["delta_net/out"] = Site(delta, values, key)
    if cfg.num_experts:
        found["experts/in"] = Site(every, *hidden)
        width, key = cfg.moe_intermediate_size, "moe_intermediate_size"
        found["experts/mid"] = Site(every, width, key, cfg.num_experts_per_token)
    else:
        found["mlp/in"] = Site(every, *hidden)
        found["mlp/mid"] = Site(every, cfg.intermediate_size, "intermediate_size")
    if cfg.shared_expert_size:
        found["shared_expert/in"] = Site(every, *hidden)
        found["shared_expert/mid"] = Site(every, cfg.shared_expert_size, "shared_expert_size")
    if not cfg.tie_embeddings:
        found["head/in"] = Site(last, *hidden)
    return found


def site_layers(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The layers that have each site."""
    return {site: of.layers for site, of in sites(cfg).items()}
