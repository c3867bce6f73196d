"""From logits to probabilities, in one place for the sampler and the trainer.

The policy is softmax(logits / temperature), float32, over the whole vocabulary. A rollout may draw
from the most likely tokens only (top_p < 1 or top_k > 0); its log-probs are then those of what was
drawn from, log p - log(mass kept), while a trainer scores under the whole policy. The log of the
mass kept is all that lies between the two.

Letters: B sequences, T tokens, V vocabulary, H tokens of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def log_softmax(logits: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """Log-probs (nats, float32 [..., V]). At temperature 0, those of temperature 1."""
    divisor = jnp.where(jnp.asarray(temperature) > 0, temperature, 1.0)
    return jax.nn.log_softmax(logits.astype(jnp.float32) / divisor, axis=-1)


def next_token_log_probs(
    logits_BTV: jax.Array, tokens_BT: jax.Array, temperature: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of each token given its past, and the entropy it was drawn under; nats, [B, T].

    logits_BTV are those of a forward over tokens_BT; entry t of the results reads logits t - 1, and
    entry 0, which nothing predicts, is 0.
    """
    logp_BTV = log_softmax(logits_BTV[:, :-1], temperature)
    logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], axis=-1)[..., 0]
    entropy_BT = -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)
    return tuple(jnp.pad(a, ((0, 0), (1, 0))) for a in (logp_BT, entropy_BT))


def kept_tokens(logp_BV: jax.Array, top_p: float, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Bool [B, V]: the tokens that truncation keeps; and the log of their probability (nats, [B]).

    The top_k most likely (0: all), of these as few as reach top_p; of equals those of lower index.
    """
    order_BV = jnp.argsort(-logp_BV, axis=-1)
    p_BV = jnp.exp(jnp.take_along_axis(logp_BV, order_BV, axis=-1))  # most likely first
    kept_BV = jnp.cumsum(p_BV, axis=-1) - p_BV < top_p
    if top_k:
        kept_BV &= jnp.arange(p_BV.shape[-1]) < top_k
    kept_BV = jnp.take_along_axis(kept_BV, jnp.argsort(order_BV, axis=-1), axis=-1)
    return kept_BV, jax.nn.logsumexp(logp_BV, axis=-1, where=kept_BV)


class Head(NamedTuple):
    """The most likely tokens of each position's distribution, likeliest first."""

    tokens_BTH: jax.Array  # int32
    logp_BTH: jax.Array  # float32, nats, of the whole vocabulary


def head(logits_BV: jax.Array, size: int, temperature: jax.Array | float) -> Head:
    """The Head of `size` tokens [B, H] of distributions [B, V]; ties go to the lower id."""
    logp_BH, token_BH = jax.lax.top_k(log_softmax(logits_BV, temperature), size)
    return Head(token_BH, logp_BH)


def of_head(
    logits_BTV: jax.Array, tokens_BTH: jax.Array, temperature: jax.Array | float
) -> jax.Array:
    """Log-probs of the tokens of a Head given their past, nats [B, T, H].

    Entry t reads logits t - 1, as in `next_token_log_probs`; entry 0 is 0.
    """
    logp_BTV = log_softmax(logits_BTV[:, :-1], temperature)
    logp_BTH = jnp.take_along_axis(logp_BTV, tokens_BTH[:, 1:], axis=-1)
    return jnp.pad(logp_BTH, ((0, 0), (1, 0), (0, 0)))


def sample(
    logits_BV: jax.Array,
    key_B: jax.Array,
    temperature: jax.Array | float,
    top_p: float = 1.0,
    top_k: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Tokens int32 [B] drawn with each sequence's own key, their log-probs, log of the mass kept.

    argmax(logits + temperature * gumbel) draws from softmax(logits / temperature) and is greedy at
    0. Log-probs (nats) are those under what was drawn from; without truncation the last is None.
    """
    gumbel_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(key_B)
    logp_BV, log_mass_B = log_softmax(logits_BV, temperature), None
    if top_p < 1 or top_k:
        kept_BV, log_mass_B = kept_tokens(logp_BV, top_p, top_k)
        logits_BV = jnp.where(kept_BV, logits_BV, -jnp.inf)
        logp_BV = logp_BV - log_mass_B[:, None]
    token_B = jnp.argmax(logits_BV + temperature * gumbel_BV, axis=-1).astype(jnp.int32)
    return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0], log_mass_B
