"""Sparse attention (QSA): an indexer chooses the blocks of tokens that each query attends to.

    q_h = rope(norm(x Wq_h));  key = x Wk, one for all heads, cached raw
    block key = rope(norm(mean of the block's keys)) at the position of the block's first token
    score of a block = sum over heads relu(q_h . block key) / sqrt(C)
A query at position p sees the tokens 0..p: (p + 1) // block complete blocks and an incomplete tail.
It attends to the `budget / block` blocks of highest score and to the tail, with all heads of the
main attention alike; to everything where that is no more. The choice has no gradient.

In the attention block, whose scores the selection masks:

    indexer = Indexer(cfg, name="indexer")
    q_BTHC, key_BTC = indexer(x_BTD, positions_BT, context)       # x as normed for q, k and v
    key_BSC = ...                                   # the keys of positions 0..S-1, from the cache
    selected_BTS = indexer.select(q_BTHC, key_BSC, positions_BT)  # implies the causal mask

Source: qwen.md 2.7.

Letters: B sequences, T tokens, S positions attended, D model, H indexer heads, C indexer head size,
b blocks.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import to_compute
from trace_jax.kernels.matmul import float32_einsum, matmul
from trace_jax.models.architecture import IndexerConfig, ModelConfig
from trace_jax.models.layer_context import LayerContext
from trace_jax.models.normalization import RMSNorm
from trace_jax.models.parameters import weight
from trace_jax.models.rotary import rope


class Indexer(nn.Module):
    """The indexer of one attention layer."""

    cfg: ModelConfig

    def setup(self) -> None:
        """The norms of queries and block keys, over one head."""
        cfg, size = self.cfg, self.cfg.indexer.head_dim
        self.q_norm = RMSNorm(size, cfg.rms_norm_eps, cfg.zero_centered_norms)
        self.k_norm = RMSNorm(size, cfg.rms_norm_eps, cfg.zero_centered_norms)

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, positions_BT: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Queries float32 [B, T, H, C], normed and rotated, and raw keys [B, T, C].

        The keys are in the compute dtype, so that a forward without cache compares the same numbers
        as one that caches them.
        """
        cfg, H, C = self.cfg, self.cfg.indexer.num_heads, self.cfg.indexer.head_dim
        B, T, D = x_BTD.shape
        shape = ((H + 1) * C, D)
        qk = weight(self, "qk", shape, (None, "embed"), context, cfg.initializer_range)
        heads = matmul(context.plain(x_BTD), qk).reshape(B, T, H + 1, C)
        q_BTHC = rope(self.q_norm(heads[:, :, :H]), positions_BT, cfg.rope_theta, cfg.rotary_dim)
        return q_BTHC, to_compute(heads[:, :, H], context.dtype)

    def select(self, q_BTHC: jax.Array, key_BSC: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Which of the positions 0..S-1 each query attends to, bool [B, T, S].

        key_BSC: raw keys by position, float32 or bfloat16; those beyond a query's position are not
        looked at. S is any length above the largest position.
        """
        cfg, size = self.cfg, self.cfg.indexer.block
        B, S, C = key_BSC.shape
        blocks = S // size
        # Keys of a last, incomplete block are never compared: no query sees that block whole.
        split = key_BSC[:, : blocks * size].astype(jnp.float32).reshape(B, blocks, size, C)
        key_BbC = self.k_norm(jnp.mean(split, axis=2))
        starts_Bb = jnp.broadcast_to(size * jnp.arange(blocks), (B, blocks))
        key_Bb1C = rope(key_BbC[:, :, None], starts_Bb, cfg.rope_theta, cfg.rotary_dim)
        return select(q_BTHC, key_Bb1C[:, :, 0], positions_BT, S, cfg.indexer)


def select(
    q_BTHC: jax.Array, key_BbC: jax.Array, positions_BT: jax.Array, length: int, cfg: IndexerConfig
) -> jax.Array:
    """The choice among block keys, bool [B, T, length]; of equal scores the lower block wins."""
    seen_BTS = jnp.arange(length) <= positions_BT[..., None]
    blocks, most = key_BbC.shape[1], cfg.budget // cfg.block
    if blocks <= most:
        return seen_BTS
    q_BTHC, key_BbC = jax.lax.stop_gradient((q_BTHC, key_BbC))
    dots_BTHb = float32_einsum("BTHC,BbC->BTHb", q_BTHC, key_BbC)
    scores_BTb = jnp.sum(jax.nn.relu(dots_BTHb), axis=2) * q_BTHC.shape[-1] ** -0.5

    complete_BT1 = ((positions_BT + 1) // cfg.block)[..., None]
    visible_BTb = jnp.arange(blocks) < complete_BT1
    chosen_BTb = visible_BTb & highest(jnp.where(visible_BTb, scores_BTb, -jnp.inf), most)
    chosen_BTS = jnp.repeat(chosen_BTb, cfg.block, axis=-1, total_repeat_length=blocks * cfg.block)
    padding = ((0, 0), (0, 0), (0, length - blocks * cfg.block))
    tail_BTS = jnp.arange(length) >= cfg.block * complete_BT1
    return seen_BTS & (tail_BTS | jnp.pad(chosen_BTS, padding))


def highest(scores: jax.Array, count: int) -> jax.Array:
    """Which `count` values along the last axis `lax.top_k` takes, as a mask, without a scatter."""
    least = jax.lax.top_k(scores, count)[0][..., -1:]
    above, equal = scores > least, scores == least
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= room))
