"""What a correction makes of the gap: weights by hand, and the mean score that centering takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl import corrections

K_BT = np.array([[0.4, 1.0, 1.5], [4.0, 1.0, 2.0], [0.25, 0.5, 8.0]], np.float32)
MASK_BT = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 0]], np.float32)
LOG_K_BT = jnp.where(MASK_BT > 0, jnp.log(K_BT), 0)
MEAN_B = [0.6 ** (1 / 3), 2.0, 0.125**0.5]  # geometric


def check(weights, expected_BT, name, counted_BT):
    weight_BT, terms_BT = weights
    real = MASK_BT > 0
    np.testing.assert_allclose(weight_BT[real], np.array(expected_BT)[real], rtol=1e-6)
    assert list(terms_BT) == [name]
    assert np.array_equal(terms_BT[name][real], np.array(counted_BT, bool)[real])


def test_truncation():
    check(
        corrections.tis(LOG_K_BT, 1.2),
        [[0.4, 1, 1.2], [1.2, 1, 0], [0.25, 0.5, 0]],
        "policy/truncated_share",
        [[0, 0, 1], [1, 0, 0], [0, 0, 0]],
    )


def test_tokens_outside_a_band_are_masked_and_the_others_weighed():
    check(
        corrections.icepop(LOG_K_BT, 0.45, 2.0),
        [[0, 1, 1.5], [0, 1, 0], [0, 0.5, 0]],
        "policy/masked_share",
        [[1, 0, 0], [1, 0, 0], [1, 0, 0]],
    )


def test_sequences_outside_a_band_are_masked_and_the_others_left_alone():
    outside = [[0] * 3, [0] * 3, [1] * 3]
    band = corrections.sequence_mask(LOG_K_BT, MASK_BT, 0.5, 2.1)
    check(band, [[1] * 3, [1] * 3, [0] * 3], "policy/masked_share", outside)


def test_sequences_outside_a_trust_band_are_masked_and_the_others_weighed():
    outside = [[0] * 3, [1] * 3, [1] * 3]
    expected_BT = [[MEAN_B[0]] * 3, [0] * 3, [0] * 3]
    band = corrections.trust_band(LOG_K_BT, MASK_BT, 0.8, 1.28)
    check(band, expected_BT, "policy/masked_share", outside)


def test_no_gap_is_a_weight_of_one():
    none_BT, mask_BT = jnp.zeros((2, 3)), jnp.ones((2, 3))
    for weight_BT, terms_BT in (
        corrections.tis(none_BT, 1.0),
        corrections.icepop(none_BT, 0.5, 5.0),
        corrections.sequence_mask(none_BT, mask_BT, 0.5, 2.0),
        corrections.trust_band(none_BT, mask_BT, 0.8, 1.28),
    ):
        assert np.array_equal(weight_BT, np.ones((2, 3)))
        assert not any(np.any(x_BT) for x_BT in terms_BT.values())


def test_the_ratio_to_the_rollout_has_no_gradient_and_no_padding():
    old_BT, rollout_BT = jnp.array([[-1.0, jnp.nan]]), jnp.array([[-1.5, jnp.inf]])
    mask_BT = jnp.array([[1.0, 0.0]])
    np.testing.assert_allclose(corrections.rollout_ratio(old_BT, rollout_BT, mask_BT), [[0.5, 0]])
    for of in (0, 1):
        total = lambda *logp_BT: jnp.sum(corrections.rollout_ratio(*logp_BT, mask_BT))
        assert not np.any(jax.grad(total, of)(old_BT, rollout_BT))


# -- score centering -------------------------------------------------------------------------------


def centre(logits_V, q_V, head):
    """C of one position whose trainer is softmax(logits) and whose rollout is q."""
    ids = np.array(head)
    logp_V, logq_V = jax.nn.log_softmax(logits_V), jnp.log(jnp.asarray(q_V))
    args = logp_V[ids][None, None], logq_V[ids][None, None]
    return corrections.score_centering(*args, jnp.ones((1, 1)))[0, 0]


def test_one_token_of_the_head_by_hand():
    """rho = (1 - 0.8) / (1 - 0.5) = 0.4; C = (0.8 - 0.4 * 0.5) log 0.5."""
    c = centre(jnp.log(jnp.array([0.5, 0.3, 0.2])), np.array([0.8, 0.1, 0.1]), [0])
    np.testing.assert_allclose(c, 0.6 * np.log(0.5), rtol=1e-6)


@pytest.mark.parametrize("head", [range(6), (4, 1, 0)])
def test_its_gradient_is_the_mean_score_under_the_rollout(head):
    """Of logits: sum_v q(v) (e_v - p) = q - p, where the tail of q is that of p rescaled."""
    rng = np.random.default_rng(0)
    logits_V = rng.normal(size=6).astype(np.float32)
    p_V = np.exp(logits_V) / np.exp(logits_V).sum()
    q_V = p_V.copy()
    q_V[list(head)] *= rng.uniform(0.5, 1.1, len(head))
    tail = [v for v in range(6) if v not in head]
    if tail:
        q_V[tail] *= (1 - q_V[list(head)].sum()) / q_V[tail].sum()
    else:
        q_V /= q_V.sum()
    gradient_V = jax.grad(centre)(jnp.asarray(logits_V), q_V, list(head))
    np.testing.assert_allclose(gradient_V, q_V - p_V, atol=1e-6)


def test_two_equal_distributions_have_no_drift():
    logits_V = jnp.array([0.3, -1.0, 2.0, 0.1])
    p_V = jax.nn.softmax(logits_V)
    np.testing.assert_allclose(centre(logits_V, p_V, [2, 0]), 0, atol=1e-6)
    np.testing.assert_allclose(jax.grad(centre)(logits_V, p_V, [2, 0]), 0, atol=1e-6)


def test_nothing_is_read_where_the_mask_is_zero():
    junk_BTH = jnp.full((1, 2, 3), jnp.nan).at[:, 0].set(-1.0)
    mask_BT = jnp.array([[1.0, 0.0]])
    total = lambda logp_BTH: jnp.sum(corrections.score_centering(logp_BTH, junk_BTH, mask_BT))
    assert np.isfinite(total(junk_BTH))
    gradient_BTH = jax.grad(total)(junk_BTH)
    assert np.all(np.isfinite(gradient_BTH))
    assert not np.any(gradient_BTH[:, 1])
