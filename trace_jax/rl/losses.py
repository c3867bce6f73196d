"""Losses: pure functions of log-probs that return (sum, count).

The caller adds sums and counts over micro-batches and devices and divides once, so that every token
(or sequence) of the global batch weighs the same however it was split.

With r the ratio of the trainer's policy now to the old one (that which sampled, or the trainer
before its first update), A the advantage and w what a correction weighs a token by
(rl/corrections.py), all of them are means of

    -w * surrogate(r, A)

over tokens (GRPO) or over sequences, each of which takes the mean of its tokens (GSPO, TBPO).
Letters: B sequences, T tokens.
"""

import jax
import jax.numpy as jnp

from trace_jax.rl.gap import bounded, importance_ratio, log_ratio, sequence_ratio


def grpo(
    logp_BT: jax.Array,
    logp_old_BT: jax.Array,
    advantage_B: jax.Array,
    mask_BT: jax.Array,
    weight_BT: jax.Array | float = 1.0,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio_cap: float = 5.0,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """(loss_sum, token_count, terms) of the clipped surrogate against the old log-probs.

        ratio = exp(logp - logp_old)
        r     = min(ratio, ratio_cap)
        loss  = -sum over masked tokens of w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Taken to the policy that sampled, the ratio carries staleness and mismatch alike. Clipping is
    pessimistic: it only ever lowers the objective. With A < 0 it therefore leaves large ratios
    alone, and there the cap acts: beyond it the loss is constant and its gradient zero.

    Args:
        logp_BT: [B, T] log-probs (nats) under the trainer; the only argument that gets a gradient.
        logp_old_BT: [B, T] log-probs that the ratio is taken to.
        advantage_B: [B] one advantage a sequence.
        mask_BT: [B, T], 1 on tokens that count and 0 elsewhere (prompt, padding, dropped groups),
            where the log-probs may hold anything.
        weight_BT: [B, T], not negative: what a correction weighs each token by.
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
    share_BT = token_mean(mask_BT)
    ratio_BT = importance_ratio(log_ratio(logp_BT, jax.lax.stop_gradient(logp_old_BT), mask_BT))
    capped_BT = jnp.minimum(ratio_BT, ratio_cap)
    surrogate_BT, clipped_BT = _clipped(capped_BT, advantage_B, clip_low, clip_high)
    terms_BT = {
        "policy/importance_ratio": ratio_BT,
        "policy/clipped_share": clipped_BT,
        "policy/capped_share": ratio_BT > ratio_cap,
    }
    return _sums(surrogate_BT, weight_BT, share_BT, terms_BT)


def gspo(
    logp_BT: jax.Array,
    logp_old_BT: jax.Array,
    advantage_B: jax.Array,
    mask_BT: jax.Array,
    weight_BT: jax.Array | float = 1.0,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """(loss_sum, sequence_count, terms) of the surrogate of whole sequences.

        s    = exp(mean over a sequence's masked tokens of logp - logp_old)
        loss = -sum over sequences of mean_t w_t min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

    All tokens of a sequence have its ratio, and each passes on its own share of the gradient, so
    that a weight of 0 silences a token.

    Arguments as of `grpo`. Sequences without a masked token count for nothing. The terms,
    policy/importance_ratio and policy/clipped_share, are sums over sequences.

    Source: GSPO (arXiv 2507.18071), in the form with token weights of its section on GSPO-token.
    """
    share_BT = sequence_mean(mask_BT)
    ratio_BT = _ratio_of_sequence(logp_BT, logp_old_BT, mask_BT)
    surrogate_BT, clipped_BT = _clipped(ratio_BT, advantage_B, clip_low, clip_high)
    terms_BT = {"policy/importance_ratio": ratio_BT, "policy/clipped_share": clipped_BT}
    return _sums(surrogate_BT, weight_BT, share_BT, terms_BT)


def tbpo(
    logp_BT: jax.Array,
    logp_old_BT: jax.Array,
    advantage_B: jax.Array,
    mask_BT: jax.Array,
    weight_BT: jax.Array | float = 1.0,
    *,
    low: float,
    high: float,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """(loss_sum, sequence_count, terms) of the surrogate of sequences within a trust band.

        s    = exp(mean over a sequence's masked tokens of logp - logp_old)
        loss = -sum over sequences of mean_t w_t s A where low <= s <= high, else 0

    Unlike a pessimistic clip the band has two sides whatever the sign of A: with A < 0, too, a
    sequence that has drifted far up no longer pushes. The weight of the paper, s of the old policy
    to the rollout's within the same band, is `corrections.trust_band`.

    Arguments as of `grpo`; policy/clipped_share counts the sequences outside the band.

    Source: QaRL (arXiv 2604.07853). That a dropped sequence stays in the denominator is our
    reading, and its bounds are not known.
    """
    share_BT = sequence_mean(mask_BT)
    ratio_BT = _ratio_of_sequence(logp_BT, logp_old_BT, mask_BT)
    inside_BT = (low <= ratio_BT) & (ratio_BT <= high)
    surrogate_BT = jnp.where(inside_BT, ratio_BT * _column(advantage_B), 0)
    terms_BT = {"policy/importance_ratio": ratio_BT, "policy/clipped_share": ~inside_BT}
    return _sums(surrogate_BT, weight_BT, share_BT, terms_BT)


def _sums(surrogate_BT, weight_BT, share_BT, terms_BT):
    """(loss_sum, count, terms) of a surrogate and of terms by token."""
    terms = {name: total(x_BT, share_BT) for name, x_BT in terms_BT.items()}
    return -total(_fixed(weight_BT) * surrogate_BT, share_BT), total(1.0, share_BT), terms


def token_mean(mask_BT: jax.Array) -> jax.Array:
    """Each token's share in a sum over tokens, float32 [B, T]: 1 where the mask is set, else 0."""
    return (mask_BT > 0).astype(jnp.float32)


def sequence_mean(mask_BT: jax.Array) -> jax.Array:
    """Each token's share in a sum over sequences, float32 [B, T]: 1 / its sequence's tokens."""
    real_BT = token_mean(mask_BT)
    return real_BT / jnp.maximum(jnp.sum(real_BT, axis=1, keepdims=True), 1)


def total(x_BT: jax.Array | float, share_BT: jax.Array) -> jax.Array:
    """The sum of x * share, a float32 scalar; x may hold anything where the share is 0."""
    return jnp.sum(x_BT * share_BT, where=share_BT > 0, dtype=jnp.float32)


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


def _ratio_of_sequence(logp_BT, logp_old_BT, mask_BT):
    """The ratio of its sequence at each token, [B, T]; d ratio / d logp is the ratio."""
    log_ratio_BT = log_ratio(logp_BT, jax.lax.stop_gradient(logp_old_BT), mask_BT)
    one_BT = jnp.exp(bounded(log_ratio_BT) - jax.lax.stop_gradient(bounded(log_ratio_BT)))
    return _fixed(sequence_ratio(log_ratio_BT, mask_BT)) * one_BT


def _clipped(ratio_BT, advantage_B, clip_low, clip_high):
    """(min(r A, clip(r) A), where the clip lowered it), both [B, T]."""
    plain_BT = ratio_BT * _column(advantage_B)
    clipped_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high) * _column(advantage_B)
    return jnp.minimum(plain_BT, clipped_BT), clipped_BT < plain_BT


def _column(advantage_B):
    return _fixed(advantage_B.astype(jnp.float32))[:, None]


def _fixed(x):
    return jax.lax.stop_gradient(x)
