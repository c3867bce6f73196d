"""Truncated sampling, computed by hand: which tokens stay, and what log-probs they then have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rollout import log_probs

P_V = np.array([0.1, 0.4, 0.3, 0.2])
LOGITS_BV = jnp.asarray(np.log(P_V)[None].repeat(2000, axis=0) + 3, jnp.float32)
KEY_B = jax.vmap(jax.random.key)(np.arange(2000))


def kept(top_p, top_k, p_V=P_V):
    kept_BV, log_mass_B = log_probs.kept_tokens(jnp.log(jnp.asarray(p_V))[None], top_p, top_k)
    return np.flatnonzero(kept_BV[0]).tolist(), float(np.exp(log_mass_B[0]))


@pytest.mark.parametrize(
    ("top_p", "top_k", "tokens", "mass"),
    [
        (1.0, 0, [0, 1, 2, 3], 1.0),
        (0.3, 0, [1], 0.4),  # the most likely stays, whatever top_p
        (0.5, 0, [1, 2], 0.7),  # as few as reach it
        (0.75, 0, [1, 2, 3], 0.9),
        (0.95, 0, [0, 1, 2, 3], 1.0),
        (1.0, 2, [1, 2], 0.7),
        (1.0, 9, [0, 1, 2, 3], 1.0),
        (0.75, 1, [1], 0.4),  # both at once: the smaller
        (0.3, 3, [1], 0.4),
    ],
)
def test_what_stays(top_p, top_k, tokens, mass):
    found, found_mass = kept(top_p, top_k)
    assert found == tokens
    assert found_mass == pytest.approx(mass, rel=1e-6)


def test_of_equals_the_lower_index_stays():
    assert kept(1.0, 2, [0.25, 0.25, 0.25, 0.25]) == ([0, 1], pytest.approx(0.5))
    assert kept(0.3, 0, [0.25, 0.25, 0.25, 0.25]) == ([0, 1], pytest.approx(0.5))


def test_draws_come_from_the_truncated_policy_and_so_do_their_log_probs():
    token_B, logp_B, log_mass_B = log_probs.sample(LOGITS_BV, KEY_B, 1.0, top_p=0.75)
    drawn_V = np.bincount(token_B, minlength=4) / len(token_B)
    np.testing.assert_allclose(drawn_V, [0, 4 / 9, 3 / 9, 2 / 9], atol=0.04)
    np.testing.assert_allclose(np.exp(logp_B), P_V[token_B] / 0.9, rtol=1e-5)
    np.testing.assert_allclose(np.exp(log_mass_B), 0.9, rtol=1e-5)


def test_the_temperature_comes_before_the_truncation():
    p_V = np.sqrt(P_V) / np.sqrt(P_V).sum()  # temperature 2
    token_B, logp_B, log_mass_B = log_probs.sample(LOGITS_BV, KEY_B, 2.0, top_k=2)
    assert set(token_B.tolist()) == {1, 2}
    np.testing.assert_allclose(np.exp(log_mass_B), p_V[1] + p_V[2], rtol=1e-5)
    np.testing.assert_allclose(np.exp(logp_B), p_V[token_B] / (p_V[1] + p_V[2]), rtol=1e-5)


def test_the_trainers_log_prob_less_the_log_of_the_mass_is_that_of_the_draw():
    """Exactly what lies between the two sides, temperature by temperature."""
    for temperature in (0.0, 0.7, 1.0):
        token_B, logp_B, log_mass_B = log_probs.sample(LOGITS_BV, KEY_B, temperature, 0.75, 3)
        whole_BV = log_probs.log_softmax(LOGITS_BV, temperature)
        whole_B = jnp.take_along_axis(whole_BV, token_B[:, None], axis=-1)[:, 0]
        np.testing.assert_array_equal(whole_B - log_mass_B, logp_B)


def test_without_truncation_there_is_no_mass_and_the_draws_are_those_of_before():
    token_B, logp_B, log_mass_B = log_probs.sample(LOGITS_BV, KEY_B, 1.0)
    assert log_mass_B is None
    again_B, same_B, mass_B = log_probs.sample(LOGITS_BV, KEY_B, 1.0, top_k=4)
    assert np.array_equal(token_B, again_B)
    np.testing.assert_allclose(logp_B, same_B, atol=1e-6)
    np.testing.assert_allclose(mass_B, 0, atol=1e-6)
