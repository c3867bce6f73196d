"""A Hugging Face checkpoint, opened and checked: what our leaves are made of in it."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from trace_jax.guidance.policy import WEIGHT_SITE
from trace_jax.models.hugging_face import config as hf_config
from trace_jax.models.hugging_face import names as hf_names
from trace_jax.models.hugging_face import quantized as hf_quantized
from trace_jax.models.hugging_face import tensors as hf_tensors
from trace_jax.models.hugging_face.names import Leaf, Piece
from trace_jax.models.hugging_face.tensors import Spec

LOG = logging.getLogger("trace_jax")
NAMED = 10  # names that an error lists of each kind


class Checkpoint:
    """A directory as transformers, ModelOpt or compressed-tensors write it.

    Its arrays go by our names, as those of hf_sources.Imported.
    """

    def __init__(self, directory: str | Path, dequantize: bool = False) -> None:
        """Reads config and headers; no weights.

        dequantize: NVFP4 becomes float32 arrays instead of packed leaves.
        Raises FileNotFoundError for an incomplete directory, ValueError for a config that is not
        supported and for tensors that are missing, unexpected or of another shape.
        """
        self.directory, self.dequantize = Path(directory), dequantize
        path = self.directory / "config.json"
        if not path.exists():
            raise FileNotFoundError(f"no config.json in {directory}: not a checkpoint directory")
        self.config = hf_tensors.read_json(path)
        self.cfg = hf_config.read(self.config)
        self.tensors = hf_tensors.directory_tensors(self.directory)
        self.quantization = hf_quantized.quantization_of(self.config, self.directory)
        self.layout = hf_names.layout_of(self.tensors)
        self.unpacks = False  # whether anything here is other than the checkpoint declares
        self._check()
        self._check_constants()

    def leaves(self, layer: int | None) -> tuple[Leaf, ...]:
        """The leaves of a layer, or (None) those outside layers."""
        return hf_names.leaves(self.cfg, self.layout, layer)

    def specs(self, layer: int | None) -> dict[str, Spec]:
        """Shape and dtype of each array. Raises ValueError for a leaf stored in several ways."""
        found = {}
        for leaf in self.leaves(layer):
            found |= self._specs(layer, leaf)
        return found

    def chunks(self, layer: int | None, name: str) -> Iterator[np.ndarray]:
        """The values of an array in order. Raises ValueError where gate and up differ in scale."""
        leaf, part = next(
            (leaf, part)
            for leaf in self.leaves(layer)
            for part in ("", *hf_quantized.PARTS)
            if name == (f"{leaf.name}/{part}" if part else leaf.name)
        )
        for pieces in leaf.parts:
            if part == "outer":
                yield self._outer(pieces)
            else:
                for piece in pieces:
                    yield from self._rows(piece, part)

    def _kind(self, name):
        return hf_quantized.kind_of(name, self.tensors, self.quantization)

    def _specs(self, layer, leaf):
        """The arrays of a leaf."""
        dtypes = {}
        for piece in leaf.pieces:
            kind = self._kind(piece.tensor)
            if kind == "fp8":
                dtypes[hf_quantized.BF16] = piece.tensor
            elif kind == "plain":
                dtypes[self.tensors[piece.tensor].dtype] = piece.tensor
            else:
                dtypes[np.dtype(np.float32) if self.dequantize else None] = piece.tensor
        where = leaf.name if layer is None else f"layer {layer}: {leaf.name}"
        if len(dtypes) > 1:
            ways = ", ".join(f"{name} is {dtype or 'NVFP4'}" for dtype, name in dtypes.items())
            raise ValueError(f"{where} is stored in several ways: {ways}; try dequantize")
        (dtype,) = dtypes
        if dtype is not None:
            return {leaf.name: Spec(leaf.shape, dtype)}
        if leaf.name not in WEIGHT_SITE:
            raise ValueError(f"{where} is NVFP4, but the model reads it unpacked: use dequantize")
        name, *lead, width = leaf.name, *leaf.shape
        return {
            f"{name}/codes": Spec((*lead, width // 2), np.uint8),
            f"{name}/scales": Spec((*lead, width // hf_quantized.BLOCK), hf_quantized.E4M3),
            f"{name}/outer": Spec(leaf.shape[:1] if leaf.stacked else (), np.float32),
        }

    def _rows(self, piece: Piece, part: str) -> Iterator[np.ndarray]:
        """The rows of a piece in one of its arrays."""
        name, style, kind = piece.tensor, self.quantization.style, self._kind(piece.tensor)
        if part == "codes":
            yield from _taken(self.tensors[name + style.codes], piece.take)
        elif part == "scales":
            yield from _taken(self.tensors[name + hf_quantized.SCALES], piece.take)
        elif kind == "plain":
            yield from _taken(self.tensors[name], piece.take)
        elif kind == "fp8":
            yield from self._fp8_rows(piece)
        else:
            codes, scales = (np.concatenate([*self._rows(piece, p)]) for p in ("codes", "scales"))
            yield hf_quantized.dequantize(codes, scales, self._outer((piece,)))

    def _fp8_rows(self, piece):
        """The rows of an FP8 piece in BF16; a few at a time where one scale is for all."""
        tensor, block = self.tensors[piece.tensor], self.quantization.block
        scale = hf_tensors.read(self.tensors[hf_quantized.fp8_scale(piece.tensor, self.tensors)])
        if scale.size == 1:
            for rows in _taken(tensor, piece.take):
                yield hf_quantized.dequantize_fp8(rows, scale, block)
        elif isinstance(piece.take, int):
            rows = hf_tensors.read(tensor, piece.take, 1)[0]
            yield hf_quantized.dequantize_fp8(rows, scale[piece.take], block)
        else:
            yield hf_quantized.dequantize_fp8(hf_tensors.read(tensor), scale, block)[piece.take]

    def _outer(self, pieces):
        """The outer scale that the pieces of a part share."""
        found = {}
        for piece in pieces:
            scale = hf_tensors.read(self.tensors[piece.tensor + self.quantization.style.outer])
            scale = scale.astype(np.float32).reshape(-1)
            scale = scale[piece.take if scale.size > 1 else 0]
            found[piece.tensor] = 1 / scale if self.quantization.style.reciprocal else scale
        if len(set(found.values())) > 1:
            raise ValueError(
                f"{self.directory}: {found} are multiplied as one matrix and must share one outer "
                "scale; use dequantize"
            )
        return np.float32(found[pieces[0].tensor])

    def beside(self) -> list[str]:
        """The tensors that are no part of the language model: other towers, statistics."""
        return [name for name in self.tensors if hf_names.is_beside(name, self.cfg)]

    def say_what_is_beside(self, fate: str) -> None:
        """Logs how many tensors are not modelled, and what becomes of them."""
        names = self.beside()
        kinds = sorted({hf_names.kind_beside(name) for name in names})
        if names:
            LOG.info("%d tensors are not modelled and %s: %s", len(names), fate, ", ".join(kinds))

    def _check(self):
        """Raises ValueError listing the tensors that do not fit."""
        wanted, missing, misshapen = {}, [], []
        for layer in (None, *range(self.cfg.num_layers)):
            for leaf in self.leaves(layer):
                for piece in leaf.pieces:
                    kind = self._kind(piece.tensor)
                    self.unpacks |= kind == "fp8" or (self.dequantize and kind == "nvfp4")
                    wanted |= hf_quantized.stored_shapes(
                        piece.tensor, piece.shape, self.tensors, self.quantization
                    )
        for name, shapes in wanted.items():
            if name not in self.tensors:
                missing.append(name)
            elif self.tensors[name].shape not in shapes:
                misshapen.append(f"{name} {self.tensors[name].shape}, not {shapes[-1]}")
        constants = hf_names.constants(self.cfg, self.layout)
        known = {*wanted, *constants, *self.beside()}
        unexpected = [n for n in self.tensors if n not in known and not n.endswith("inv_freq")]
        if missing or unexpected or misshapen:
            kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
            raise ValueError(f"{self.directory} does not fit its config.json:\n" + listing(kinds))

    def _check_constants(self):
        """Raises ValueError where the n-gram hash of the checkpoint is not ours."""
        for name, ours in hf_names.constants(self.cfg, self.layout).items():
            if name in self.tensors:
                theirs = hf_tensors.read(self.tensors[name])
                if not np.array_equal(theirs, ours):
                    raise ValueError(f"{name} is {theirs}, but the config makes it {ours}")


def listing(kinds: Mapping[str, list[str]]) -> str:
    """The names of each kind, the first few, with their number."""
    lines = []
    for kind, names in kinds.items():
        if names:
            more = ", ..." if len(names) > NAMED else ""
            lines.append(f"  {len(names)} {kind}: {', '.join(names[:NAMED])}{more}")
    return "\n".join(lines)


def _taken(tensor, take):
    """The rows of a tensor, in order, a few at a time."""
    if isinstance(take, slice):
        yield from hf_tensors.chunks(tensor)
    elif isinstance(take, int):
        yield hf_tensors.read(tensor, take, 1)[0]
    else:
        yield hf_tensors.read(tensor)[take]
