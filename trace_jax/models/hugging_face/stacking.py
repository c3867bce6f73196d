"""A parameter tree, layers stacked over repeats, out of arrays that are read layer by layer.

Every leaf is allocated once and filled where it lies, so that nothing is in memory twice.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.models import architecture
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.hugging_face import tensors as hf_tensors
from trace_jax.models.hugging_face.quantized import PARTS
from trace_jax.models.hugging_face.sources import TABLE, Imported
from trace_jax.models.hugging_face.tensors import Spec
from trace_jax.models.ngram_embedding import HostTable


class Source(Protocol):
    """Where arrays come from, by our names; layer None has those outside layers."""

    cfg: ModelConfig

    def specs(self, layer: int | None) -> dict[str, Spec]:
        """Shape and dtype of each array of a layer."""

    def chunks(self, layer: int | None, name: str) -> Iterator[np.ndarray]:
        """The values of an array in order, a few rows at a time."""


def stacked(source: Source, shardings: Any = None, host_table: bool = False) -> dict:
    """The parameter tree of a Source, dtypes as they are there.

    shardings: None, one Sharding, or a tree of them like that of the masters; each device's share
    is then read for itself. host_table: n-gram tables become HostTables, memory maps of an import.
    Raises ValueError where layers of one stack are stored in different ways.
    """
    tree = {}
    for name, spec in source.specs(None).items():
        _insert(tree, name, _leaf(source, (None,), name, spec, _part_of(shardings, name)))
    for segment in architecture.segments(source.cfg):
        for position in range(len(segment.kinds)):
            layers, path = segment.layers_at(position), f"{segment.name}/{position}/"
            for name, spec in _common_specs(source, layers).items():
                if name == TABLE and host_table:
                    leaf = _host_table(source, layers, spec)
                else:
                    leaf = _leaf(source, layers, name, spec, _part_of(shardings, path + name))
                _insert(tree, path + name, leaf)
    return _packed(tree)


def _common_specs(source, layers):
    """The arrays of each of the layers."""
    first = source.specs(layers[0])
    for layer in layers[1:]:
        found = source.specs(layer)
        if found != first:
            differ = sorted(map(str, found.items() ^ first.items()))
            raise ValueError(
                f"layers {layers[0]} and {layer} are stacked, but stored in different ways: "
                f"{differ[:4]}; use dequantize"
            )
    return first


def _leaf(source, layers, name, spec, sharding) -> jax.Array:
    """One array, the layers stacked (layer None: not), on the default device or sharded."""
    single = layers == (None,)
    shape = spec.shape if single else (len(layers), *spec.shape)
    if sharding is None:
        out = _aligned(shape, spec.dtype)
        for index, layer in enumerate(layers):
            _fill(out if single else out[index : index + 1], source.chunks(layer, name))
        return jax.device_put(out)
    if name.endswith("/outer") and isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: len(shape)]))

    def share(index):
        if single:
            return np.asarray(_array(source, None, name, spec)[index], order="C")
        mine = layers[index[0]]
        return np.stack([_array(source, layer, name, spec)[index[1:]] for layer in mine])

    return jax.make_array_from_callback(shape, sharding, share)


def _array(source, layer, name, spec):
    """An array of which a share is taken: a map where there is a file of it, else a copy."""
    if isinstance(source, Imported):
        return source.mapped(layer, name)
    out = np.empty(spec.shape, spec.dtype)
    _fill(out, source.chunks(layer, name))
    return out


def _host_table(source, layers, spec):
    if len(layers) > 1:
        raise ValueError(f"layers {layers}: n-gram tables that are stacked cannot stay on the host")
    return HostTable(_array(source, layers[0], TABLE, spec))


def _fill(out: np.ndarray, chunks: Iterator[np.ndarray]) -> None:
    """Fills a contiguous array in order."""
    flat, position = out.reshape(-1), 0
    for rows in chunks:
        flat[position : position + rows.size] = rows.reshape(-1)
        position += rows.size
    assert position == flat.size, (position, out.shape)


def _aligned(shape, dtype):
    """An uninitialised array that JAX takes over without a copy, on CPU."""
    size = hf_tensors.nbytes(Spec(shape, dtype))
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _part_of(shardings: Any, path: str) -> Sharding | None:
    """The Sharding of an array; the three of a packed leaf may share that of the leaf."""
    for key in path.split("/"):
        if shardings is None or isinstance(shardings, Sharding):
            return shardings
        is_packed = isinstance(shardings, BlockScaled)
        shardings = getattr(shardings, key) if is_packed else shardings[key]
    return shardings


def _insert(tree: dict, path: str, leaf: Any) -> None:
    *parents, last = path.split("/")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = leaf


def _packed(tree: Any) -> Any:
    """The tree with the three arrays of each packed leaf as a BlockScaled."""
    if not isinstance(tree, dict):
        return tree
    if set(tree) == set(PARTS):
        return BlockScaled(*(tree[part] for part in PARTS))
    return {key: _packed(value) for key, value in tree.items()}
