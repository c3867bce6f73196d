"""The log-prob gap between the trainer and the rollout, and the metrics that watch it.

Both sides score the same sampled tokens; were they the same program, the gap would be 0 everywhere.
Letters: B sequences, T tokens.
"""

import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import largest_magnitude

# e^20 = 4.9e8: far beyond any ratio that is used, and its square still fits float32.
LOG_RATIO_LIMIT = 20.0


def log_ratio(logp_BT: jax.Array, logp_rollout_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """logp - logp_rollout in nats, float32 [B, T]; exactly 0 where the mask is 0.

    Padding may hold anything (-inf, NaN): it is replaced before any non-linear function sees it,
    so that neither values nor gradients can leak out of it.
    """
    difference_BT = logp_BT.astype(jnp.float32) - logp_rollout_BT.astype(jnp.float32)
    return jnp.where(mask_BT > 0, difference_BT, 0.0)


def importance_ratio(log_ratio_BT: jax.Array) -> jax.Array:
    """exp(log_ratio), float32 [B, T]; finite for any log-ratio but NaN, no gradient beyond +-20."""
    return jnp.exp(bounded(log_ratio_BT))


def bounded(log_ratio_BT: jax.Array) -> jax.Array:
    """The log-ratio within +-20 nats, float32 [B, T]; no gradient beyond."""
    return jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_ratio(log_ratio_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """The geometric mean of a sequence's ratios over its masked tokens, float32 [B, 1].

    1 for a sequence without any. log_ratio_BT is that of `log_ratio`: 0 where the mask is 0.
    """
    tokens_B1 = jnp.sum(mask_BT > 0, axis=1, keepdims=True)
    sum_B1 = jnp.sum(bounded(log_ratio_BT), axis=1, keepdims=True)
    return jnp.exp(sum_B1 / jnp.maximum(tokens_B1, 1))


def kl_k3(log_ratio_BT: jax.Array) -> jax.Array:
    """e^r - r - 1 in nats, float32 [B, T], never negative: the k3 estimate of KL(rollout || train).

    Source: http://joschu.net/blog/kl-approx.html
    """
    r_BT = bounded(log_ratio_BT)
    # The difference cancels for the small gaps that guidance leaves (11% off at r = 1e-6), so the
    # Taylor series takes over where its first omitted term is at float32 resolution.
    series_BT = r_BT**2 / 2 * (1 + r_BT / 3 * (1 + r_BT / 4 * (1 + r_BT / 5)))
    return jnp.where(jnp.abs(r_BT) < 0.1, series_BT, jnp.expm1(r_BT) - r_BT)


def gap_metrics(
    logp_train_BT: jax.Array, logp_rollout_BT: jax.Array, mask_BT: jax.Array
) -> dict[str, jax.Array]:
    """The mismatch metrics of a batch, float32 scalars under the names of metrics.jsonl.

    With r = logp_train - logp_rollout and rho = e^r on the masked tokens:

        mismatch/logp_abs_mean   mean |r|                                              nats
        mismatch/logp_abs_max    max |r|                                               nats
        mismatch/logp_abs_p999   99.9% quantile of |r| (linear between tokens)         nats
        mismatch/kl_k3_nats      mean(rho - r - 1)                                     nats
        mismatch/ess             1 / mean(w^2), w = rho / mean(rho)     effective share of the batch

    Equal inputs give exactly 0, 0, 0, 0, 1. The maximum grows with the number of tokens: compare it
    between runs of equal size only, or compare the quantile.

    Args:
        logp_train_BT: [B, T] log-probs (nats) of the sampled tokens under the trainer.
        logp_rollout_BT: [B, T] the same under the distribution they were sampled from.
        mask_BT: [B, T], 1 on completion tokens; at least one token must be set.

    Source: verl docs/algo/rollout_corr.md (definitions).
    """
    real_BT = mask_BT > 0
    r_BT = log_ratio(logp_train_BT, logp_rollout_BT, mask_BT)
    abs_BT = jnp.abs(r_BT)

    def mean(x_BT: jax.Array) -> jax.Array:
        return jnp.mean(x_BT, where=real_BT)

    rho_BT = importance_ratio(r_BT)
    w_BT = rho_BT / mean(rho_BT)
    return {
        "mismatch/logp_abs_mean": mean(abs_BT),
        "mismatch/logp_abs_max": largest_magnitude(abs_BT, axis=None),
        "mismatch/logp_abs_p999": jnp.nanquantile(jnp.where(real_BT, abs_BT, jnp.nan), 0.999),
        "mismatch/kl_k3_nats": mean(kl_k3(r_BT)),
        "mismatch/ess": 1.0 / mean(w_BT**2),
    }
