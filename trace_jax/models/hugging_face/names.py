"""The one table of names: which rows of which Hugging Face tensors make up each of our leaves.

    part[rows] = tensor[take]      reading; the other way round, writing

A leaf has one part or, with experts, one an expert. Only leading axes are named, so the same table
moves values, packed FP4 codes and block scales. Source: qwen.md section 3, transformers 5.24.
"""

import functools
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from trace_jax.models import config, ngram_embedding
from trace_jax.models.architecture import DELTA_NET, DeltaNetConfig, ModelConfig

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
FUSED = ".mlp.experts.gate_up_proj"
INTERLEAVED = ".linear_attn.in_proj_qkvz"
SHARD = ".ngram_embedding.shard_"
# Beside the language model: never modelled, kept by an import so that an export is complete.
BESIDE = ("model.visual.", "visual.", "mtp.", "model.mtp.")  # other towers
STATISTICS = (  # of quantization, and of the n-gram table
    ".input_scale", ".input_global_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale",
    ".token_lookup",
)  # fmt: skip


class Layout(NamedTuple):
    """What differs between checkpoints of the same model."""

    prefix: str = "model."
    fused_experts: bool = False  # one tensor for the experts of a layer
    interleaved: bool = False  # Qwen3-Next: the DeltaNet projections, by key head
    ngram_shards: int = 0  # 0: the table is one tensor


class Piece(NamedTuple):
    """Rows of one tensor that are rows of one part of a leaf."""

    tensor: str
    shape: tuple[int, ...]  # of the tensor
    rows: slice  # of the part, along its leading axis
    take: slice | int | np.ndarray  # of the tensor, along its leading axis


class Leaf(NamedTuple):
    """A leaf of one layer, or of none."""

    name: str  # path in the tree of its layer, "attention/q"
    shape: tuple[int, ...]
    parts: tuple[tuple[Piece, ...], ...]  # [experts] or [1]; the pieces of a part in order of rows

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of all its parts."""
        return tuple(itertools.chain.from_iterable(self.parts))

    @property
    def stacked(self) -> bool:
        """Whether the leading axis counts parts (experts)."""
        return len(self.shape) == 3

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one part."""
        return self.shape[1:] if self.stacked else self.shape


def layout_of(names: Iterable[str]) -> Layout:
    """The Layout that a checkpoint's names show. Raises ValueError where there is no embedding."""
    names = [name for name in names if not name.startswith(BESIDE)]
    prefixes = [name.removesuffix(EMBED) for name in names if name.endswith(EMBED)]
    if len(prefixes) != 1:
        raise ValueError(f"the checkpoint has {len(prefixes)} tensors named ...{EMBED}, not one")
    shards = {name.split(SHARD)[1].split(".")[0] for name in names if SHARD in name}
    return Layout(
        prefixes[0],
        fused_experts=any(FUSED in name for name in names),
        interleaved=any(INTERLEAVED in name for name in names),
        ngram_shards=len(shards),
    )


def kind_beside(name: str) -> str:
    """What a tensor beside the language model is, as a pattern; "" for one that is none."""
    for prefix in BESIDE:
        if name.startswith(prefix):
            return f"{prefix}*"
    for end in STATISTICS:
        if name.endswith(end):
            return f"*{end}"
    return "*.hashstats_*" if ".ple_embedding.hashstats_" in name else ""


def is_beside(name: str, cfg: ModelConfig) -> bool:
    """Whether a tensor is no part of the language model, or a copy (of tied embeddings)."""
    return bool(kind_beside(name)) or (cfg.tie_embeddings and name == HEAD)


def whole(name: str, tensor: str, shape: tuple[int, ...], stored: tuple[int, ...] = ()) -> Leaf:
    """A leaf that is one tensor, which may be `stored` in another shape with the same rows."""
    return Leaf(name, shape, ((Piece(tensor, stored or shape, slice(0, shape[0]), slice(None)),),))


def joined(name: str, tensors: Iterable[str], shape: tuple[int, ...], rows: int) -> Leaf:
    """A leaf of tensors below one another, `rows` each, the last one what is left."""
    return Leaf(name, shape, (_below(tensors, shape, rows),))


@functools.lru_cache(maxsize=2)  # one layer is asked for many times in a row, and takes 6 ms
def leaves(cfg: ModelConfig, layout: Layout, layer: int | None) -> tuple[Leaf, ...]:
    """The leaves of a layer, or (None) those outside layers."""
    found = _top_leaves(cfg, layout) if layer is None else _layer_leaves(cfg, layout, layer)
    return tuple(found)


def _top_leaves(cfg, layout):
    table = (cfg.vocab_size, cfg.hidden_size)
    found = [whole("embed", layout.prefix + EMBED, table)]
    if cfg.hyper_connection:
        mixer = layout.prefix + "hyper_connection_mixer."
        found += _connection(cfg, "final_mixer", mixer)
    else:
        found.append(whole("final_norm/scale", layout.prefix + "norm.weight", (cfg.hidden_size,)))
    if not cfg.tie_embeddings:
        found.append(whole("head", HEAD, table))
    return found


def _layer_leaves(cfg, layout, layer):
    prefix, D = f"{layout.prefix}layers.{layer}.", cfg.hidden_size
    if cfg.hyper_connection:
        found = [
            *_connection(cfg, "mixer_connection", f"{prefix}attn_hyper_connection.", inject=True),
            *_connection(
                cfg, "feed_forward_connection", f"{prefix}mlp_hyper_connection.", inject=True
            ),
        ]
    else:
        found = [
            whole("input_norm/scale", f"{prefix}input_layernorm.weight", (D,)),
            whole("post_attention_norm/scale", f"{prefix}post_attention_layernorm.weight", (D,)),
        ]
    if cfg.mixers[layer] == DELTA_NET:
        found += _delta_net(cfg, layout, f"{prefix}linear_attn.")
    else:
        found += _attention(cfg, f"{prefix}self_attn.")
    if cfg.num_experts:
        found += _experts(cfg, layout, f"{prefix}mlp.")
    else:
        found += _feed_forward("mlp", f"{prefix}mlp.", D, cfg.intermediate_size)
    if cfg.shared_expert_size:
        shared = f"{prefix}mlp.shared_expert"
        found += _feed_forward("shared_expert", f"{shared}.", D, cfg.shared_expert_size)
        found.append(whole("shared_expert/gate", f"{shared}_gate.weight", (1, D)))
    if cfg.ngram and layer in cfg.ngram.layers:
        found += _ngram(cfg, layout, f"{prefix}ple.", cfg.ngram.layers.index(layer))
    return found


def constants(cfg: ModelConfig, layout: Layout) -> dict[str, np.ndarray]:
    """The int64 tensors of a checkpoint that follow from its config."""
    found = {}
    for ordinal, layer in enumerate(cfg.ngram.layers if cfg.ngram else ()):
        prefix = f"{layout.prefix}layers.{layer}.ple.ple_embedding."
        primes = config.ngram_primes(cfg.ngram, ordinal)
        multipliers = ngram_embedding.multipliers(cfg.ngram, cfg.vocab_size, ordinal)
        for name, values in (
            ("layer_multipliers", multipliers),
            ("ngram_heads_vocab_sizes", primes),
            ("ngram_heads_offsets", np.cumsum((0, *primes[:-1]))),
        ):
            found[prefix + name] = np.asarray(values, np.int64)
    return found


def deinterleaved(d: DeltaNetConfig) -> dict[str, np.ndarray]:
    """The rows of in_proj_qkvz and in_proj_ba that are qkv, z, b and a. Source: qwen.md 2.4.

    By key head they are [q dk | k dk | v r dv | z r dv] and [b r | a r], r value heads each.
    """
    dk, ratio = d.key_head_dim, d.num_value_heads // d.num_key_heads
    rows = np.arange(2 * (d.key_width + d.value_width)).reshape(d.num_key_heads, -1)
    q, k, v, z = np.split(rows, np.cumsum((dk, dk, ratio * d.value_head_dim)), axis=1)
    b, a = np.split(np.arange(2 * d.num_value_heads).reshape(d.num_key_heads, -1), 2, axis=1)
    flat = {"z": z.ravel(), "b": b.ravel(), "a": a.ravel()}
    return {"qkv": np.concatenate([q.ravel(), k.ravel(), v.ravel()]), **flat}


def _below(tensors, shape, rows):
    """Pieces below one another in a part of a shape."""
    starts = range(0, shape[0], rows)
    return tuple(
        Piece(tensor, (end - start, *shape[1:]), slice(start, end), slice(None))
        for tensor, start in zip(tensors, starts, strict=True)
        for end in (min(start + rows, shape[0]),)
    )


def _connection(cfg, name, prefix, inject=False):
    h, wide = cfg.hyper_connection, cfg.hyper_connection.streams * cfg.hidden_size
    found = [
        whole(f"{name}/norm/scale", f"{prefix}hc_norm.weight", (wide,)),
        whole(f"{name}/down", f"{prefix}input_mix_weight_down.weight", (h.rank, wide)),
        whole(f"{name}/up", f"{prefix}input_mix_weight_up.weight", (wide, h.rank)),
    ]
    if inject:
        tensor = f"{prefix}block_inject_weight.weight"
        found.append(whole(f"{name}/inject", tensor, (h.streams, wide)))
    return found


def _attention(cfg, prefix):
    D, queries, keys = (
        cfg.hidden_size,
        cfg.num_heads * cfg.head_dim,
        cfg.num_kv_heads * cfg.head_dim,
    )
    found = [
        whole("attention/q", f"{prefix}q_proj.weight", (queries * (1 + cfg.attention_gate), D)),
        whole("attention/k", f"{prefix}k_proj.weight", (keys, D)),
        whole("attention/v", f"{prefix}v_proj.weight", (keys, D)),
        whole("attention/o", f"{prefix}o_proj.weight", (D, queries)),
    ]
    if cfg.qk_norm:
        found += [
            whole(f"attention/{name}/scale", f"{prefix}{name}.weight", (cfg.head_dim,))
            for name in ("q_norm", "k_norm")
        ]
    if i := cfg.indexer:
        name, prefix = "attention/indexer", f"{prefix}indexer."
        found += [
            whole(
                f"{name}/qk", f"{prefix}index_qk_proj.weight", ((i.num_heads + 1) * i.head_dim, D)
            ),
            whole(f"{name}/q_norm/scale", f"{prefix}q_layernorm.weight", (i.head_dim,)),
            whole(f"{name}/k_norm/scale", f"{prefix}k_layernorm.weight", (i.head_dim,)),
        ]
    return found


def _delta_net(cfg, layout, prefix):
    d, D = cfg.delta_net, cfg.hidden_size
    heads, conv = d.num_value_heads, (d.conv_width, d.conv_size)
    rows = {"qkv": d.conv_width, "z": d.value_width, "b": heads, "a": heads}
    if layout.interleaved:
        take = deinterleaved(d)
        projections = [
            Leaf(f"delta_net/{name}", (rows[name], D), ((Piece(
                f"{prefix}in_proj_{tensor}.weight", (sum(rows[part] for part in parts), D),
                slice(0, rows[name]), take[name],
            ),),))
            for tensor, parts in (("qkvz", ("qkv", "z")), ("ba", ("b", "a")))
            for name in parts
        ]  # fmt: skip
    else:
        projections = [
            whole(f"delta_net/{name}", f"{prefix}in_proj_{name}.weight", (size, D))
            for name, size in rows.items()
        ]
    return [
        *projections,
        whole("delta_net/conv", f"{prefix}conv1d.weight", conv, stored=(conv[0], 1, conv[1])),
        whole("delta_net/A_log", f"{prefix}A_log", (heads,)),
        whole("delta_net/dt_bias", f"{prefix}dt_bias", (heads,)),
        whole("delta_net/norm/scale", f"{prefix}norm.weight", (d.value_head_dim,)),
        whole("delta_net/out", f"{prefix}out_proj.weight", (D, d.value_width)),
    ]


def _feed_forward(name, prefix, D, F):
    tensors = [f"{prefix}{half}_proj.weight" for half in ("gate", "up")]
    return [
        joined(f"{name}/gate_up", tensors, (2 * F, D), F),
        whole(f"{name}/down", f"{prefix}down_proj.weight", (D, F)),
    ]


def _experts(cfg, layout, prefix):
    E, D, F = cfg.num_experts, cfg.hidden_size, cfg.moe_intermediate_size
    shapes = {"gate_up": (E, 2 * F, D), "down": (E, D, F)}
    found = [whole("experts/router", f"{prefix}gate.weight", (E, D))]
    for name, shape in shapes.items():
        halves = name.split("_")
        if layout.fused_experts:  # no .weight in these names
            tensor, rows = f"{prefix}experts.{name}_proj", slice(0, shape[1])
            parts = tuple((Piece(tensor, shape, rows, e),) for e in range(E))
        else:
            parts = tuple(
                _below(
                    [f"{prefix}experts.{e}.{half}_proj.weight" for half in halves],
                    shape[1:],
                    shape[1] // len(halves),
                )
                for e in range(E)
            )
        found.append(Leaf(f"experts/{name}", shape, parts))
    return found


def _ngram(cfg, layout, prefix, ordinal):
    n, D = cfg.ngram, cfg.hidden_size
    wide = cfg.hyper_connection.streams * D
    norms = [
        whole(f"ngram/{name}_norm/scale", f"{prefix}norm_{name}.weight", (wide,))
        for name in ("key", "query", "conv")
    ]
    table = (config.ngram_rows(n, ordinal), n.row_width)
    name, rows = f"{prefix}ple_embedding.ngram_embedding.", table[0]
    tensors = [f"{name}weight"]
    if layout.ngram_shards:
        rows = math.ceil(table[0] / layout.ngram_shards)  # the last shard may be shorter
        tensors = [f"{name}shard_{index}.weight" for index in range(math.ceil(table[0] / rows))]
    conv = (wide, n.conv_size)
    return [
        whole("ngram/key", f"{prefix}key_proj.weight", (wide, n.embed_dim)),
        whole("ngram/value", f"{prefix}value_proj.weight", (D, n.embed_dim)),
        *norms,
        whole("ngram/conv", f"{prefix}conv1d.weight", conv, stored=(wide, 1, n.conv_size)),
        joined("ngram/table", tensors, table, rows),
    ]
