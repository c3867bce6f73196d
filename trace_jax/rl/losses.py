"""Losses: pure functions of log-probs that return (sum, token count).

The caller adds sums and counts over micro-batches and devices and divides once, so that every token
of the global batch weighs the same however it was split. Letters: B sequences, T tokens.
"""

import jax
import jax.numpy as jnp

from trace_jax.rl.gap import importance_ratio, log_ratio


def grpo(
    logp_BT: jax.Array,
    logp_rollout_BT: jax.Array,
    advantage_B: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio_cap: float = 5.0,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """(loss_sum, token_count, terms) of the clipped surrogate against the rollout's log-probs.

        ratio = exp(logp - logp_rollout)
        r     = min(ratio, ratio_cap)
        loss  = -sum over masked tokens of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    The ratio is taken to the policy that sampled (no recomputed old log-probs), so it carries
    staleness and mismatch alike. Clipping is pessimistic: it only ever lowers the objective. With
    A < 0 it therefore leaves large ratios alone, and there the cap acts: beyond it the loss is
    constant and its gradient zero.

    Args:
        logp_BT: [B, T] log-probs (nats) under the trainer; the only argument that gets a gradient.
        logp_rollout_BT: [B, T] log-probs of the distribution sampled from.
        advantage_B: [B] one advantage a sequence.
        mask_BT: [B, T], 1 on tokens that count and 0 elsewhere (prompt, padding, dropped groups),
            where the log-probs may hold anything.
        clip_low: how far below 1 the ratio still has a gradient when A < 0.
        clip_high: how far above 1 the ratio still has a gradient when A > 0.
        ratio_cap: upper bound of the ratio; above 1 + clip_high.

    Returns:
        loss_sum: float32 scalar; divide by the token count of the global batch.
        token_count: float32 scalar, the number of masked tokens: the denominator.
        terms: float32 sums with the same denominator, named as the metrics they become:
            policy/importance_ratio (before any truncation), policy/clipped_share (tokens where
            the clip lowered the objective), policy/capped_share (tokens with a ratio beyond the
            cap).

    Source: clip 0.2 / 0.28 and token mean: DAPO (arXiv 2503.14476); "token-level importance-ratio
    clip upper bound 5": TRACE (arXiv 2610.07767), read here as a bound on this ratio.
    """
    real_BT = mask_BT > 0
    advantage_B1 = jax.lax.stop_gradient(advantage_B.astype(jnp.float32))[:, None]
    logp_rollout_BT = jax.lax.stop_gradient(logp_rollout_BT)

    ratio_BT = importance_ratio(log_ratio(logp_BT, logp_rollout_BT, mask_BT))
    capped_BT = jnp.minimum(ratio_BT, ratio_cap)
    plain_BT = capped_BT * advantage_B1
    clipped_BT = jnp.clip(capped_BT, 1.0 - clip_low, 1.0 + clip_high) * advantage_B1

    def total(x_BT: jax.Array) -> jax.Array:
        return jnp.sum(x_BT, where=real_BT, dtype=jnp.float32)

    terms = {
        "policy/importance_ratio": total(ratio_BT),
        "policy/clipped_share": total(clipped_BT < plain_BT),
        "policy/capped_share": total(ratio_BT > ratio_cap),
    }
    return -total(jnp.minimum(plain_BT, clipped_BT)), total(real_BT), terms


def cross_entropy(logp_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(-sum of masked logp in nats, masked token count), float32 scalars: the supervised loss.

    Args:
        logp_BT: [B, T] log-probs (nats) of the target tokens; anything where the mask is 0.
        mask_BT: [B, T], 1 on tokens to learn.

    The denominator is the token count of the global batch.
    """
    real_BT = mask_BT > 0
    loss_sum = -jnp.sum(logp_BT, where=real_BT, dtype=jnp.float32)
    return loss_sum, jnp.sum(real_BT, dtype=jnp.float32)
