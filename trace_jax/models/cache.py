"""What decoding remembers: keys and values, packed FP4 or not, and recurrent state.

Keys and values lie as [A, B, K, S, C] over the A attention layers: they are carried through the
layer scan and only the new rows are written, so no step copies them (measured: other layouts, or
the cache as scanned input, cost one to three copies). Narrow floats are held as integers of the
same bits for the same reason (formats/bits.py). DeltaNet layers hold a state and a convolution tail
instead, whose size does not grow; sparse attention also holds its index keys, n-gram embeddings the
last tokens and a tail.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.formats import bits, block_scaled
from trace_jax.formats import quantize as formats
from trace_jax.formats.block_scaled import BlockScaled, Operand
from trace_jax.guidance.policy import Policy
from trace_jax.guidance.stacked import at_row
from trace_jax.models import delta_net, ngram_embedding
from trace_jax.models.architecture import ATTENTION, DELTA_NET, ModelConfig, layers_with
from trace_jax.models.delta_net import DeltaState
from trace_jax.models.ngram_embedding import NgramState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The memory of `batch` sequences. A part that the model has no layers for is None."""

    k: BlockScaled | jax.Array | None  # [A, B, K, S, C], in the dtypes of `bits`
    v: BlockScaled | jax.Array | None
    index_keys: jax.Array | None  # [A, B, S, Ci] of sparse attention, compute dtype
    delta: DeltaState | None  # stacked over the DeltaNet layers
    ngram: NgramState | None  # stacked over the layers with an n-gram embedding
    length: int = dataclasses.field(metadata=dict(static=True))  # tokens a sequence can hold


def empty(cfg: ModelConfig, policy: Policy, batch: int, length: int, dtype: jnp.dtype) -> Cache:
    """A Cache that remembers nothing, for `batch` sequences of up to `length` tokens."""
    attention, delta = (len(layers_with(cfg, mixer)) for mixer in (ATTENTION, DELTA_NET))

    def rows(site):
        shape = (attention, batch, cfg.num_kv_heads, length)
        fmt = policy.fmt(site)
        one = lambda x: x.astype(dtype) if fmt is None else formats.quantize(x, fmt)
        row = jax.eval_shape(one, jnp.zeros(cfg.head_dim))
        return jax.tree.map(lambda a: jnp.zeros(shape + a.shape, bits.dtype_of(a.dtype)), row)

    def stack(layers, state):
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (layers, *a.shape)), state)

    n = cfg.ngram
    keys = (attention, batch, length, cfg.indexer.head_dim) if cfg.indexer else None
    return Cache(
        k=rows("attention/k") if attention else None,
        v=rows("attention/v") if attention else None,
        index_keys=jnp.zeros(keys, bits.dtype_of(dtype)) if keys else None,
        delta=stack(delta, delta_net.empty(cfg, batch)) if delta else None,
        ngram=stack(len(n.layers), ngram_embedding.empty(cfg, batch)) if n else None,
        length=length,
    )


def check_room(cache: Cache, tokens_BT: jax.Array, positions_BT: jax.Array) -> None:
    """Raises ValueError where these tokens overflow the cache, as far as can be known."""
    known = not isinstance(positions_BT, jax.core.Tracer)
    needed = np.asarray(positions_BT).max() + 1 if known else tokens_BT.shape[1]
    if needed > cache.length:
        raise ValueError(
            f"{needed} tokens do not fit a cache of length {cache.length}: make a longer one"
        )


def with_row(stacked: Any, row: jax.Array, new: Any) -> Any:
    """The stacked tree with one layer's arrays replaced, in place under jit."""
    put = lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b.astype(a.dtype), row, 0)
    return jax.tree.map(put, stacked, new)


def write(
    cache: Cache,
    row: jax.Array,
    positions_BT: jax.Array,
    k_BTKC: BlockScaled | jax.Array,
    v_BTKC: BlockScaled | jax.Array,
) -> Cache:
    """The cache with new keys and values at each sequence's own positions, in place under jit.

    Positions must lie below the cache's length: `check_room`.
    """
    sequence_B1 = jnp.arange(positions_BT.shape[0])[:, None]

    def put(rows_ABKS, new_BTK):
        return rows_ABKS.at[row, sequence_B1, :, positions_BT].set(bits.hold(new_BTK))

    k, v = jax.tree.map(put, cache.k, k_BTKC), jax.tree.map(put, cache.v, v_BTKC)
    return dataclasses.replace(cache, k=k, v=v)


def read(cache: Cache, row: jax.Array, dtype: jnp.dtype) -> tuple[Operand, Operand]:
    """Operands (K, V) [B, K, S, C] of one attention layer, in `dtype`."""

    def one(rows):
        found = at_row(rows, row)
        if not isinstance(found, BlockScaled):
            return Operand(bits.restore(found, dtype), None)
        scales = bits.restore(found.scales, block_scaled.FORMATS[found.fmt].scale)
        return block_scaled.operand(dataclasses.replace(found, scales=scales), dtype)

    return one(cache.k), one(cache.v)


def remember_index_keys(
    cache: Cache, row: jax.Array, positions_BT: jax.Array, keys_BTC: jax.Array
) -> tuple[Cache, jax.Array]:
    """The cache with new index keys, and all keys [B, S, Ci] of that layer."""
    sequence_B1 = jnp.arange(positions_BT.shape[0])[:, None]
    held = cache.index_keys.at[row, sequence_B1, positions_BT].set(bits.hold(keys_BTC))
    cache = dataclasses.replace(cache, index_keys=held)
    return cache, bits.restore(at_row(held, row), keys_BTC.dtype)


def heads_first(x_BTKC: Operand) -> Operand:
    """The Operand [B, K, T, C] of one [B, T, K, C]: what a cache of just these tokens reads."""
    swap = lambda a: None if a is None else a.swapaxes(1, 2)
    return Operand(swap(x_BTKC.values), swap(x_BTKC.outer))
