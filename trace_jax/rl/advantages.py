"""Advantages: how much better a completion is than its siblings.

Letters: Q prompts, G completions per prompt.
"""

import jax
import jax.numpy as jnp

STD_EPSILON = 1e-6


def group_normalised(reward_QG: jax.Array, drop_zero_variance: bool) -> tuple[jax.Array, jax.Array]:
    """(advantage_QG, keep_QG): rewards standardised within each group, and which of them count.

        advantage = (reward - mean_G) / (std_G + 1e-6)        std over the population of G

    A group whose rewards are all equal teaches nothing: its advantages are exactly 0. Dropping it
    also takes its tokens out of the loss's denominator (DAPO); keeping it (GRPO) lets them dilute.

    Args:
        reward_QG: [Q, G], any real dtype.
        drop_zero_variance: whether groups of equal rewards get keep 0 instead of 1.

    Returns:
        advantage_QG: float32 [Q, G].
        keep_QG: float32 [Q, G], 1 for completions that count and 0 for dropped ones; the caller
            multiplies the token mask by it.

    Source: GRPO (arXiv 2402.03300); dropping groups: DAPO (arXiv 2503.14476).
    """
    reward_QG = reward_QG.astype(jnp.float32)
    # By extremes: the float32 mean of equal rewards may miss them by a rounding, and the division
    # by a tiny std would blow that up to a visible advantage.
    varies_Q1 = reward_QG.max(axis=1, keepdims=True) != reward_QG.min(axis=1, keepdims=True)

    centred_QG = reward_QG - reward_QG.mean(axis=1, keepdims=True)
    std_Q1 = jnp.sqrt(jnp.mean(centred_QG**2, axis=1, keepdims=True))
    advantage_QG = jnp.where(varies_Q1, centred_QG / (std_Q1 + STD_EPSILON), 0.0)

    keep_Q1 = varies_Q1 if drop_zero_variance else jnp.ones_like(varies_Q1)
    return advantage_QG, jnp.broadcast_to(keep_Q1, reward_QG.shape).astype(jnp.float32)
