"""What an export writes, settled before the first byte: every tensor, its form, its shard.

Nothing that is packed already is quantized again: its codes and scales are written as they are.
What is quantized here goes through the one quantizer, one outer scale for each of our matrices (so
gate and up share theirs): an export holds the numbers of the rollout. Source: qwen.md section 4.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.formats.quantize import quantize_matrices
from trace_jax.guidance import policy as policies
from trace_jax.guidance.policy import NOTHING, Policy, Rules
from trace_jax.models import architecture
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.hugging_face import config as hf_config
from trace_jax.models.hugging_face import names as hf_names
from trace_jax.models.hugging_face import quantized as hf_quantized
from trace_jax.models.hugging_face import sources as hf_sources
from trace_jax.models.hugging_face import tensors as hf_tensors
from trace_jax.models.hugging_face.names import Leaf, Piece
from trace_jax.models.hugging_face.quantized import BF16, BLOCK, SCALES, STYLES
from trace_jax.models.hugging_face.sources import Parameters
from trace_jax.models.hugging_face.tensors import Spec, Writer

LOG = logging.getLogger("trace_jax")
FLOAT32 = np.dtype(np.float32)
# Float32 in published checkpoints whose other weights are BF16 (qwen.md 3.4).
KEPT_FLOAT32 = ("delta_net/A_log", "delta_net/norm/scale")
PACKED, QUANTIZE, UNPACK, ARRAY = "packed", "quantize", "unpack", "array"

quantize_jit = jax.jit(quantize_matrices, static_argnums=1)


@dataclasses.dataclass(frozen=True)
class Options:
    """How an export differs from its source; "" leaves a thing as it is there."""

    format: str = ""  # "bf16": float32 rounded, packed unpacked; "nvfp4": float32 rounded or packed
    style: str = ""  # of packed weights, a key of hf_quantized.STYLES
    layout: str = ""  # of experts: "split" or "fused"
    quantize: Rules = ()  # what "nvfp4" packs; default: the experts, or the MLP of a dense model
    shard_bytes: float = 5e9
    input_scale: float = 1.0  # static outer scale of activations where the source names none

    def __post_init__(self):
        known = {"format": ("bf16", "nvfp4"), "style": (*STYLES,), "layout": ("split", "fused")}
        for name, choices in known.items():
            if getattr(self, name) not in ("", *choices):
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {choices}")
        for name in ("shard_bytes", "input_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")


class Item(NamedTuple):
    """Tensors that stay in one shard: a weight with its scales, say."""

    specs: dict[str, Spec]
    write: Callable[[Writer], None]


class Move(NamedTuple):
    """A piece of a leaf on its way to a tensor."""

    layer: int | None
    leaf: Leaf
    part: int
    piece: Piece
    form: str  # PACKED as it is, QUANTIZE, UNPACK, or ARRAY
    dtype: np.dtype | None  # of UNPACK and ARRAY, as written


def specs_of(items: list[Item]) -> dict[str, Spec]:
    """The tensors of items."""
    return {name: spec for item in items for name, spec in item.specs.items()}


class Plan:
    """The shards of an export, and the small files beside them."""

    def __init__(self, source: Parameters, options: Options) -> None:
        """Raises ValueError where the options or the parameters do not fit the model."""
        self.source, self.options = source, options
        self.config, self.layout, method = source.config, source.layout, source.quantization.method
        if not self.config:
            dtype = f"{source.specs(None)['embed'].dtype}"
            self.config, self.layout = hf_sources.described(source.cfg, dtype)
        if options.layout:
            self.layout = self.layout._replace(fused_experts=options.layout == "fused")
        self.style_name = options.style or (method if method in STYLES else "modelopt")
        self.style = STYLES[self.style_name]
        self.policy = packing_policy(options, source.cfg)
        self._quantized = functools.lru_cache(maxsize=2)(self._quantize)
        moves = self._moves()
        self.packs = any(move[0].form in (PACKED, QUANTIZE) for move in moves.values())
        # Whether the source's own declaration of what is quantized still holds.
        self.same = options.format == "" and method == (self.style_name if self.packs else "")
        items = [self._item(tensor, found) for tensor, found in moves.items()]
        for name, values in hf_names.constants(source.cfg, self.layout).items():
            write = functools.partial(_write, name=name, chunks=[values])
            items.append(Item({name: Spec(values.shape, values.dtype)}, write))
        beside = self._beside({name for item in items for name in item.specs})
        self.excluded = self._excluded(moves, beside)
        self.shards = _cut(items + list(beside.values()), options.shard_bytes)

    def write_small_files(self, directory: Path) -> None:
        """config.json, what declares the quantization, tokenizer files."""
        config = dict(self.config)
        if self.source.directory is not None:
            hf_sources.copy_small_files(self.source.directory, directory)
        if not self.same:
            config.pop("quantization_config", None)
            (directory / "hf_quant_config.json").unlink(missing_ok=True)
        if not self.same and self.packs:
            declared, apart = hf_quantized.declarations(self.style_name, self.excluded)
            config["quantization_config"] = declared
            if apart:
                text = json.dumps(apart, indent=2) + "\n"
                hf_tensors.write_text(directory / "hf_quant_config.json", text)
        if self.options.format:
            config = hf_config.with_dtype(config, "bfloat16")
        hf_tensors.write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")

    def _moves(self):
        """The pieces of every tensor."""
        cfg, moves = self.source.cfg, {}
        for layer in (None, *range(cfg.num_layers)):
            leaves = hf_names.leaves(cfg, self.layout, layer)
            specs = self.source.specs(layer)
            _check_leaves(layer, leaves, specs)
            for leaf in leaves:
                form, dtype = self._form(leaf, specs)
                for part, pieces in enumerate(leaf.parts):
                    for piece in pieces:
                        move = Move(layer, leaf, part, piece, form, dtype)
                        moves.setdefault(piece.tensor, []).append(move)
        return moves

    def _form(self, leaf, specs):
        """(form, dtype) of a leaf."""
        if f"{leaf.name}/codes" in specs:
            return (UNPACK, BF16) if self.options.format == "bf16" else (PACKED, None)
        if self.policy.weight_fmt(leaf.name):
            return QUANTIZE, None
        dtype = np.dtype(specs[leaf.name].dtype)
        kept = dtype == FLOAT32 and leaf.name in KEPT_FLOAT32
        return ARRAY, BF16 if self.options.format and not kept else dtype

    def _item(self, tensor, moves):
        """How a tensor is written."""
        forms = {(move.form, move.dtype) for move in moves}
        packs = {move.form for move in moves} & {PACKED, QUANTIZE}
        # A packed tensor has one outer scale: not for the experts of a layer, nor for two leaves,
        # unless these were one tensor when they were packed.
        fused = any(isinstance(move.piece.take, int) for move in moves)
        if len(forms) > 1 or (packs and fused) or (QUANTIZE in packs and len(moves) > 1):
            raise ValueError(
                f"{tensor} holds {sorted({move.leaf.name for move in moves})}, which cannot be "
                "packed together: leave them out of quantize, or take layout 'split' for experts"
            )
        if packs:
            return self._packed_item(tensor, moves)
        spec = Spec(moves[0].piece.shape, moves[0].dtype)
        chunks = functools.partial(self._chunks, moves)
        return Item({tensor: spec}, lambda writer: _write(writer, tensor, chunks()))

    def _chunks(self, moves):
        """The values of a tensor that is not packed, in order, a few rows at a time."""
        if not any(isinstance(move.piece.take, np.ndarray) for move in moves):
            for move in moves:
                yield from self._values(move)
            return
        whole = np.empty(moves[0].piece.shape, moves[0].dtype)
        for move in moves:
            whole[move.piece.take] = np.concatenate([*self._values(move)])
        yield whole

    def _values(self, move: Move) -> Iterator[np.ndarray]:
        """The rows of a piece as arrays."""
        read = functools.partial(self.source.rows, move.layer)
        rows, width = move.piece.rows, int(np.prod(move.leaf.part_shape[1:], dtype=int)) * 4
        for start in range(rows.start, rows.stop, step := max(1, hf_tensors.CHUNK // width)):
            some = slice(start, min(start + step, rows.stop))
            if move.form == UNPACK:
                codes, scales = (
                    read(f"{move.leaf.name}/{array}", move.part, some)
                    for array in ("codes", "scales")
                )
                outer = self.source.outer(move.layer, move.leaf.name, move.part)
                yield hf_quantized.dequantize(codes, scales, outer).astype(move.dtype)
            else:
                yield read(move.leaf.name, move.part, some).astype(move.dtype, copy=False)

    def _packed_item(self, tensor, moves):
        """A packed weight with its scales."""
        style, module = self.style, tensor.removesuffix("weight")
        specs = hf_quantized.packed_specs(tensor, moves[0].piece.shape, style)
        activation = self._activation(module, moves[0].form)
        if activation is not None:
            specs[module + style.activation] = Spec(style.scalar, FLOAT32)

        def write(writer):
            codes, scales, outer = self._packed(tensor, moves, specs)
            writer.write(tensor + style.codes, codes)
            writer.write(tensor + SCALES, scales)
            writer.write(tensor + style.outer, self._outer(tensor, outer))
            if activation is not None:
                writer.write(module + style.activation, np.full(style.scalar, activation, FLOAT32))

        return Item(specs, write)

    def _packed(self, tensor, moves, specs):
        """Codes, scales and outer scale of a packed tensor."""
        found = [self._packed_rows(move) for move in moves]
        outers = {float(outer) for _, _, outer in found}
        if len(outers) > 1:
            raise ValueError(f"{tensor}: its parts have several outer scales, {sorted(outers)}")
        if len(found) == 1 and isinstance(moves[0].piece.take, slice):
            return found[0]
        whole = [np.empty(spec.shape, spec.dtype) for spec in list(specs.values())[:2]]
        for move, rows in zip(moves, found, strict=True):
            for out, some in zip(whole, rows[:2], strict=True):
                out[move.piece.take] = some
        return *whole, found[0][2]

    def _packed_rows(self, move):
        """The rows of a piece, codes and scales, and its outer scale."""
        layer, name, part, rows = move.layer, move.leaf.name, move.part, move.piece.rows
        if move.form == QUANTIZE:
            q = self._quantized(layer, name, part, move.leaf.part_shape[0])
            return q.codes[rows], q.scales[rows], q.outer
        read = self.source.rows
        codes, scales = (
            read(layer, f"{name}/{array}", part, rows) for array in ("codes", "scales")
        )
        return codes, scales, self.source.outer(layer, name, part)

    def _quantize(self, layer, name, part, rows):
        """A matrix, packed, on the host."""
        values = jnp.asarray(self.source.rows(layer, name, part, slice(0, rows)))
        return jax.tree.map(np.asarray, quantize_jit(values, "nvfp4"))

    def _outer(self, tensor, outer):
        """The outer scale as the style stores it."""
        if not self.style.reciprocal:
            return np.full(self.style.scalar, outer, FLOAT32)
        if tensor + self.style.outer in self.source.beside:
            original = hf_tensors.read(self.source.beside[tensor + self.style.outer])
            if np.all(np.float32(1) / original == outer):  # other numbers may have it as reciprocal
                return original
        return np.full(self.style.scalar, hf_quantized.reciprocal(outer), FLOAT32)

    def _activation(self, module, form):
        """The activation scale of a packed module as the style stores it, or None for none."""
        for name, style in STYLES.items():
            if module + style.activation in self.source.beside:
                scale = hf_tensors.read(self.source.beside[module + style.activation])
                scale = scale.astype(FLOAT32).reshape(-1)[0]
                return scale if name == self.style_name else hf_quantized.reciprocal(scale)
        if form == PACKED and self.source.quantization.method == self.style_name:
            return None  # it quantizes weights alone
        scale = np.float32(self.options.input_scale)
        return hf_quantized.reciprocal(scale) if self.style.reciprocal else scale

    def _beside(self, written):
        """Items of what is not of the language model, where it is still declared as it was."""
        tensors = {n: tensor for n, tensor in self.source.beside.items() if n not in written}
        if self.source.quantization.method and not self.same:
            if tensors:
                LOG.warning(
                    "%d tensors beside the language model are left out: what is quantized among "
                    "them would no longer be declared",
                    len(tensors),
                )
            return {}
        items = {}
        for name, tensor in tensors.items():
            write = functools.partial(_write_stored, name=name, tensor=tensor)
            items[name] = Item({name: Spec(tensor.shape, tensor.dtype)}, write)
        return items

    def _excluded(self, moves, beside):
        """The modules that stay as they are, for a reader that would expect packed ones."""
        found = [
            tensor.removesuffix(".weight")
            for tensor, pieces in moves.items()
            if pieces[0].form in (ARRAY, UNPACK)
            and len(pieces[0].piece.shape) > 1
            and not tensor.endswith(hf_names.EMBED)
        ]
        wild = "{}*" if self.style_name == "modelopt" else "re:{}.*"
        for prefix in hf_names.BESIDE:
            if any(name.startswith(prefix) for name in beside):
                found.append(wild.format(prefix.removesuffix(".")))
        return found


def packing_policy(options: Options, cfg: ModelConfig) -> Policy:
    """What an export quantizes. Raises ValueError where that is not NVFP4, or does not fit."""
    if options.format != "nvfp4":
        return NOTHING
    rules = options.quantize or [("experts/*" if cfg.num_experts else "mlp/*", "nvfp4")]
    sites = architecture.sites(cfg)
    policy = policies.resolve(rules, sites)
    for site, fmt in policy.formats:
        if fmt != "nvfp4":
            raise ValueError(f"quantize: {site} is to be {fmt}; an export packs nvfp4 only")
        if sites[site].width % BLOCK:
            raise ValueError(
                f"model.{sites[site].key}={sites[site].width} is no multiple of {BLOCK}, the NVFP4 "
                f"block: leave {site} out of quantize"
            )
    return policy


def _check_leaves(layer, leaves, specs):
    """Raises ValueError where the parameters are not those of the model."""
    found = {}
    for name, spec in specs.items():
        if name.endswith("/codes"):
            found[name.removesuffix("/codes")] = (*spec.shape[:-1], 2 * spec.shape[-1])
        elif not name.endswith(("/scales", "/outer")):
            found[name] = spec.shape
    wanted = {leaf.name: leaf.shape for leaf in leaves}
    if found != wanted:
        differ = sorted(map(str, found.items() ^ wanted.items()))
        where = "outside layers" if layer is None else f"layer {layer}"
        raise ValueError(f"{where}: the parameters do not fit the config: {differ[:10]}")


def _cut(items, shard_bytes):
    """The items in order, a new shard where one would grow too large."""
    shards, room = [], 0
    for item in items:
        size = hf_tensors.total_bytes(item.specs)
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(item)
        room -= size
    return shards


def _write(writer, name, chunks):
    for rows in chunks:
        writer.write(name, rows)


def _write_stored(writer, name, tensor):
    _write(writer, name, hf_tensors.chunks(tensor))
