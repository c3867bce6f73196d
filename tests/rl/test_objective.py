"""Every loss under every correction: one token after the other by hand, detached, padding inert."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl import corrections
from trace_jax.rl.objective import CORRECTIONS, LOSSES, Bounds, Objective

PAIRS = list(itertools.product(LOSSES, CORRECTIONS))
each_pair = pytest.mark.parametrize(("loss", "correction"), PAIRS)
rng = np.random.default_rng(0)
B, T, H = 4, 5, 3
LOGP_BT = -rng.exponential(1.0, (B, T)).astype(np.float32)
OLD_BT = LOGP_BT + rng.normal(0, 0.2, (B, T)).astype(np.float32)
ROLLOUT_BT = OLD_BT + rng.normal(0, 0.3, (B, T)).astype(np.float32)
ADVANTAGE_B = np.array([1.0, -1.0, 2.0, -0.5], np.float32)
MASK_BT = (np.arange(T) < np.array([5, 3, 1, 4])[:, None]).astype(np.float32)
HEADS = tuple(np.log(rng.dirichlet(np.ones(H + 1), (B, T))[..., :H]) for _ in range(2))


def value(objective, logp_BT=LOGP_BT, old_BT=OLD_BT, rollout_BT=ROLLOUT_BT, heads=HEADS):
    return objective(
        *map(jnp.asarray, (logp_BT, old_BT, rollout_BT, ADVANTAGE_B, MASK_BT)),
        tuple(map(jnp.asarray, heads)),
    )


@each_pair
def test_a_pair_is_the_loss_of_the_corrections_weights(loss, correction):
    """And, under score centering, the mean of A C beside it."""
    objective = Objective(loss, correction)
    log_k_BT = jnp.where(MASK_BT > 0, OLD_BT - ROLLOUT_BT, 0)
    weight_BT, terms_BT = objective.weights(log_k_BT, MASK_BT)
    data = LOGP_BT, OLD_BT, jnp.asarray(ADVANTAGE_B), MASK_BT
    expected, count, terms = objective.surrogate(*data, weight_BT)
    share_BT = MASK_BT / (1 if loss == "grpo" else MASK_BT.sum(1, keepdims=True))
    assert count == pytest.approx(13 if loss == "grpo" else 4)
    if correction == "score_centering":
        centre_BT = corrections.score_centering(*map(jnp.asarray, HEADS), MASK_BT)
        expected += np.sum(share_BT * ADVANTAGE_B[:, None] * centre_BT)
    loss_sum, ours, metrics = value(objective)
    np.testing.assert_allclose((loss_sum, ours), (expected, count), rtol=1e-5)
    for name, x_BT in terms_BT.items():
        np.testing.assert_allclose(metrics[name], np.sum(share_BT * x_BT), rtol=1e-5)
    assert ("policy/correction_ratio" in metrics) == (correction != "none")
    if correction != "none":
        np.testing.assert_allclose(
            metrics["policy/correction_ratio"], np.sum(share_BT * np.exp(log_k_BT)), rtol=1e-5
        )
    assert metrics.keys() >= terms.keys()


@each_pair
def test_only_the_trainer_gets_a_gradient(loss, correction):
    objective = Objective(loss, correction)
    of = lambda *logps: value(objective, *logps, heads=HEADS)[0]
    ours_BT, old_BT, rollout_BT = jax.grad(of, (0, 1, 2))(LOGP_BT, OLD_BT, ROLLOUT_BT)
    assert np.any(ours_BT)
    assert not np.any(old_BT)
    assert not np.any(rollout_BT)
    ours_BTH, rollout_BTH = jax.grad(lambda *heads: value(objective, heads=heads)[0], (0, 1))(
        *map(jnp.asarray, HEADS)
    )
    assert np.any(ours_BTH) == (correction == "score_centering")
    assert not np.any(rollout_BTH)


@each_pair
def test_padding_changes_nothing(loss, correction):
    objective = Objective(loss, correction)
    of = lambda logp_BT, *rest, heads=HEADS: value(objective, logp_BT, *rest, heads)[0]
    dirty = lambda x, junk: np.where(MASK_BT.reshape(B, T, *[1] * (x.ndim - 2)) > 0, x, junk)
    clean, gradient_BT = jax.value_and_grad(of)(LOGP_BT, OLD_BT, ROLLOUT_BT)
    for junk in (np.nan, -np.inf, 1e30):
        heads = [dirty(x, junk) for x in HEADS]
        rest = dirty(OLD_BT, junk), dirty(ROLLOUT_BT, junk)
        same = jax.value_and_grad(of)(dirty(LOGP_BT, junk), *rest, heads=heads)
        assert same[0] == clean
        assert np.array_equal(same[1], gradient_BT)
    assert not np.any(gradient_BT[MASK_BT == 0])


@each_pair
def test_without_a_gap_a_correction_is_none(loss, correction):
    """k = 1 and p = q: value and gradient are those of the loss by itself."""
    of = lambda objective: jax.value_and_grad(
        lambda logp_BT: value(objective, logp_BT, rollout_BT=OLD_BT, heads=HEADS[:1] * 2)[0]
    )(LOGP_BT)
    plain, gradient_BT = of(Objective(loss))
    corrected, corrected_BT = of(Objective(loss, correction))
    np.testing.assert_allclose(corrected, plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(corrected_BT, gradient_BT, rtol=1e-6)


def test_three_tokens_of_truncated_importance_sampling_by_hand():
    """r = 1 and k = 0.5, 3, 6 at cap 2: weights 0.5, 2, 2; the ratio's own clip is untouched."""
    rollout_BT = jnp.zeros((1, 3))
    old_BT = jnp.log(jnp.array([[0.5, 3.0, 6.0]]))
    data = rollout_BT, jnp.array([-2.0]), jnp.ones((1, 3))
    run = lambda logp_BT: Objective(correction="tis")(logp_BT, old_BT, *data)
    loss_sum, count, terms = run(old_BT)
    np.testing.assert_allclose((loss_sum, count), (2 * 4.5, 3), rtol=1e-6)
    np.testing.assert_allclose(terms["policy/correction_ratio"], 9.5, rtol=1e-6)
    assert terms["policy/truncated_share"] == 2
    assert terms["policy/clipped_share"] == terms["policy/capped_share"] == 0
    gradient_BT = jax.grad(lambda logp_BT: run(logp_BT)[0])(old_BT)
    np.testing.assert_allclose(gradient_BT, [[1.0, 4.0, 4.0]], rtol=1e-6)


def test_bounds_are_the_objectives():
    names = {"clip_low": 0.5, "gspo_clip_low": 0.5, "tbpo_low": 0.5}
    below = jnp.log(jnp.array([[0.6]])), jnp.zeros((1, 1)), jnp.zeros((1, 1))
    for loss, name in zip(LOSSES, names, strict=True):
        data = *below, jnp.array([-1.0]), jnp.ones((1, 1))
        for bounds, clipped in ((Bounds(), 1), (Bounds(**{name: 0.5}), 0)):
            assert Objective(loss, bounds=bounds)(*data)[2]["policy/clipped_share"] == clipped


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"loss": "ppo"}, r"loss='ppo' is unknown: choose one of \['grpo', 'gspo', 'tbpo'\]"),
        ({"correction": "tsi"}, r"correction='tsi' is unknown: choose one of \['icepop', 'none'"),
    ],
)
def test_unknown_names_raise(names, message):
    with pytest.raises(ValueError, match=message):
        Objective(**names)


@each_pair
def test_sums_over_micro_batches_add_up_to_the_global_batch(loss, correction):
    objective = Objective(loss, correction)
    of = lambda rows: objective(
        *(jnp.asarray(x[rows]) for x in (LOGP_BT, OLD_BT, ROLLOUT_BT, ADVANTAGE_B, MASK_BT)),
        tuple(jnp.asarray(x[rows]) for x in HEADS),
    )
    added = jax.tree.map(lambda a, b: a + b, of(slice(0, 1)), of(slice(1, B)))
    for whole, summed in zip(*map(jax.tree.leaves, (of(slice(0, B)), added)), strict=True):
        assert (whole.dtype, whole.shape) == (jnp.float32, ())
        np.testing.assert_allclose(whole, summed, rtol=1e-5, atol=1e-6)
