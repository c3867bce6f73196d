"""The KV cache: keys and values of every layer, packed FP4 or in the compute dtype.

Layout [L, B, K, S, C]: it is carried through the layer scan and only the new rows are written, so
no step copies it (measured: other layouts, or the cache as scanned input, cost one to three
copies). Narrow floats are held as integers of the same bits for the same reason (formats/bits.py).
"""

import dataclasses

import jax
import jax.numpy as jnp

from trace_jax.formats import bits, block_scaled
from trace_jax.formats import quantize as formats
from trace_jax.formats.block_scaled import BlockScaled, Operand
from trace_jax.guidance.policy import Policy
from trace_jax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values [L, B, K, S, C]: each a BlockScaled or an array, in the dtypes of `bits`."""

    k: BlockScaled | jax.Array
    v: BlockScaled | jax.Array

    @property
    def length(self) -> int:
        """Positions a sequence can hold (tokens)."""
        return self.k.shape[3]


def empty(
    cfg: ModelConfig, policy: Policy, batch: int, length: int, dtype: jnp.dtype
) -> KVCache:
    """A KVCache of zeros for `batch` sequences of up to `length` tokens."""
    shape = (cfg.num_layers, batch, cfg.num_kv_heads, length)

    def zeros(site):
        fmt = policy.fmt(site)
        one = lambda x: x.astype(dtype) if fmt is None else formats.quantize(x, fmt)
        row = jax.eval_shape(one, jnp.zeros(cfg.head_dim))
        return jax.tree.map(lambda a: jnp.zeros(shape + a.shape, bits.dtype_of(a.dtype)), row)

    return KVCache(zeros("attention/k"), zeros("attention/v"))


def write(
    cache: KVCache,
    layer: jax.Array,
    positions_BT: jax.Array,
    k_BTKC: BlockScaled | jax.Array,
    v_BTKC: BlockScaled | jax.Array,
) -> KVCache:
    """The cache with rows written at each sequence's own positions, in place under jit.

    Positions must lie below the cache's length; the sampler checks that before it starts.
    """
    sequence_B1 = jnp.arange(positions_BT.shape[0])[:, None]

    def put(rows_LBKS, new_BTK):
        return rows_LBKS.at[layer, sequence_B1, :, positions_BT].set(bits.hold(new_BTK))

    return KVCache(jax.tree.map(put, cache.k, k_BTKC), jax.tree.map(put, cache.v, v_BTKC))


def read(cache: KVCache, layer: jax.Array, dtype: jnp.dtype) -> tuple[Operand, Operand]:
    """Operands (K, V) [B, K, S, C] of one layer, in `dtype`."""

    def one(rows):
        at_layer = jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, layer, 0, keepdims=False), rows
        )
        if not isinstance(at_layer, BlockScaled):
            return Operand(bits.restore(at_layer, dtype), None)
        scales = bits.restore(at_layer.scales, block_scaled.SCALE_DTYPE[at_layer.fmt])
        return block_scaled.operand(dataclasses.replace(at_layer, scales=scales), dtype)

    return one(cache.k), one(cache.v)


def heads_first(x_BTKC: Operand) -> Operand:
    """The Operand [B, K, T, C] of one [B, T, K, C]: what a cache of just these tokens reads."""
    swap = lambda a: None if a is None else a.swapaxes(1, 2)
    return Operand(swap(x_BTKC.values), swap(x_BTKC.outer))
