"""Corrections: what to make of the gap between the trainer's policy and the one that sampled.

With k = pi_old / pi_rollout, both before the first update on a rollout, on the sampled token:

    tis              weigh a token by min(k, cap)
    icepop           weigh a token by k, or by 0 where k is outside a band
    sequence_mask    weigh a sequence by 1, or by 0 where the geometric mean of k is outside a band
    trust_band       weigh a sequence by that mean, or by 0 where it is outside a band
    score_centering  weigh nothing; subtract what the gap adds to the gradient on average

No weight has a gradient. A token of weight 0 stays in the denominator of the loss. Each function
returns, with its weights, terms by token, named as the metrics that their means become.
Letters: B sequences, T tokens, H tokens of the vocabulary.
"""

import jax
import jax.numpy as jnp

from trace_jax.rl.gap import importance_ratio, log_ratio, sequence_ratio

TAIL = 1e-6  # least probability left to the tokens outside the head

Weights = tuple[jax.Array, dict[str, jax.Array]]


def rollout_ratio(
    logp_old_BT: jax.Array, logp_rollout_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
    """log k in nats, float32 [B, T], without gradient; exactly 0 where the mask is 0."""
    return jax.lax.stop_gradient(log_ratio(logp_old_BT, logp_rollout_BT, mask_BT))


def tis(log_k_BT: jax.Array, cap: float) -> Weights:
    """min(k, cap), [B, T]: truncated importance sampling; policy/truncated_share: tokens beyond it.

    Source: https://fengyao.notion.site/off-policy-rl (cap 2).
    """
    k_BT = importance_ratio(log_k_BT)
    return jnp.minimum(k_BT, cap), {"policy/truncated_share": k_BT > cap}


def icepop(log_k_BT: jax.Array, low: float, high: float) -> Weights:
    """k where low <= k <= high, else 0, [B, T]; policy/masked_share: tokens outside.

    Source: https://ringtech.notion.site/icepop; band 0.5 to 5: INTELLECT-3 (arXiv 2512.16144).
    """
    k_BT = importance_ratio(log_k_BT)
    inside_BT = (low <= k_BT) & (k_BT <= high)
    return jnp.where(inside_BT, k_BT, 0), {"policy/masked_share": ~inside_BT}


def sequence_mask(log_k_BT: jax.Array, mask_BT: jax.Array, low: float, high: float) -> Weights:
    """1 where the geometric mean of k over a sequence lies in [low, high], else 0, [B, T].

    policy/masked_share: tokens of sequences outside. Source: geometric-mean masking of
    https://yingru.notion.site/When-Speed-Kills-Stability-271211a558b7808d8b12d403fd15edda
    """
    _, inside_BT = _band(log_k_BT, mask_BT, low, high)
    return inside_BT.astype(jnp.float32), {"policy/masked_share": ~inside_BT}


def trust_band(log_k_BT: jax.Array, mask_BT: jax.Array, low: float, high: float) -> Weights:
    """The geometric mean of k over a sequence where it lies in [low, high], else 0, [B, T].

    policy/masked_share: tokens of sequences outside. Source: TBPO of QaRL (arXiv 2604.07853).
    """
    ratio_BT, inside_BT = _band(log_k_BT, mask_BT, low, high)
    return jnp.where(inside_BT, ratio_BT, 0), {"policy/masked_share": ~inside_BT}


def _band(log_k_BT, mask_BT, low, high):
    ratio_BT = jnp.broadcast_to(sequence_ratio(log_k_BT, mask_BT), log_k_BT.shape)
    return ratio_BT, (low <= ratio_BT) & (ratio_BT <= high)


def score_centering(
    logp_BTH: jax.Array, logp_rollout_BTH: jax.Array, mask_BT: jax.Array
) -> jax.Array:
    """C, [B, T]: its gradient is the mean score of a token drawn by the rollout; add A C to a loss.

        C = sum over H of sg(q(v) - rho p(v)) log p(v)       p trainer, q rollout, sg: no gradient
        rho = (1 - sum_H q) / (1 - sum_H p)

    For v drawn from p the mean of grad log p(v) is 0; drawn from q it is not, and adds a drift to
    the gradient that has nothing to do with rewards. Outside the head H, q is taken as rho p, and
    the sum over p that is left out there is minus that over the head.

    Args:
        logp_BTH: [B, T, H] the trainer's log-probs (nats, of the whole vocabulary) of the tokens of
            each position's head; gets the gradient.
        logp_rollout_BTH: [B, T, H] the same under the distribution sampled from.
        mask_BT: [B, T]; C is 0, and nothing is read, where it is 0.

    Source: Score Centering (arXiv 2609.20807), without importance sampling.
    """
    logp_BTH = jnp.where(mask_BT[..., None] > 0, logp_BTH, 0.0)
    p_BTH = jnp.exp(jax.lax.stop_gradient(logp_BTH))
    q_BTH = jnp.exp(jax.lax.stop_gradient(logp_rollout_BTH))
    tail = lambda head_BTH: 1 - jnp.sum(head_BTH, axis=-1, keepdims=True)
    rho_BT1 = jnp.maximum(tail(q_BTH), 0) / jnp.maximum(tail(p_BTH), TAIL)
    centre_BTH = (q_BTH - rho_BT1 * p_BTH) * logp_BTH
    return jnp.sum(jnp.where(mask_BT[..., None] > 0, centre_BTH, 0.0), axis=-1)
