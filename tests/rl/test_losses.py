"""The losses: tokens and sequences by hand, finite differences, masks, denominators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl.losses import cross_entropy, grpo, gspo, tbpo


def _row(*values):
    return jnp.array([values], jnp.float32)


def _loss_of_ratios(ratios, advantage):
    """(loss_sum, grad_T, count, terms) of one sequence whose tokens have the given ratios."""
    rollout_BT = _row(*[-1.0] * len(ratios))
    logp_BT = rollout_BT + jnp.log(_row(*ratios))

    def loss(logp_BT):
        loss_sum, count, terms = grpo(
            logp_BT, rollout_BT, jnp.array([advantage]), jnp.ones_like(logp_BT)
        )
        return loss_sum, (count, terms)

    (loss_sum, (count, terms)), grad_BT = jax.value_and_grad(loss, has_aux=True)(logp_BT)
    return loss_sum, grad_BT[0], count, {name: float(x) for name, x in terms.items()}


# The clip range is [0.8, 1.28], the cap 5. Derivative of a live token: -A * ratio.
@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "grad", "clipped", "capped"),
    [
        # inside the range: plain policy gradient
        ((0.9, 1.0, 1.2), 2.0, -2 * 3.1, (-1.8, -2.0, -2.4), 0, 0),
        ((0.9, 1.0, 1.2), -2.0, 2 * 3.1, (1.8, 2.0, 2.4), 0, 0),
        # A > 0: clipped above only; a ratio beyond the cap is clipped long before
        ((0.5, 2.0, 9.0), 1.0, -(0.5 + 1.28 + 1.28), (-0.5, 0.0, 0.0), 2, 1),
        # A < 0: clipped below, alive above, constant beyond the cap
        ((0.5, 2.0, 9.0), -1.0, 0.8 + 2.0 + 5.0, (0.0, 2.0, 0.0), 1, 1),
        # A = 0: no loss, no gradient, nothing counted as clipped
        ((0.5, 2.0, 9.0), 0.0, 0.0, (0.0, 0.0, 0.0), 0, 1),
    ],
)
def test_three_tokens_by_hand(ratios, advantage, loss, grad, clipped, capped):
    loss_sum, grad_T, count, terms = _loss_of_ratios(ratios, advantage)
    np.testing.assert_allclose(loss_sum, loss, rtol=1e-6)
    np.testing.assert_allclose(grad_T, grad, rtol=1e-6)
    assert count == 3
    np.testing.assert_allclose(terms["policy/importance_ratio"], sum(ratios), rtol=1e-6)
    assert terms["policy/clipped_share"] == clipped
    assert terms["policy/capped_share"] == capped


def test_the_bounds_are_arguments():
    bounds = {"clip_low": 0.4, "clip_high": 0.1, "ratio_cap": 3.0}
    logp_BT, rollout_BT = jnp.log(_row(0.5, 1.5, 4.0)), _row(0.0, 0.0, 0.0)
    loss_sum, _, terms = grpo(logp_BT, rollout_BT, jnp.array([-1.0]), jnp.ones((1, 3)), **bounds)
    np.testing.assert_allclose(loss_sum, 0.6 + 1.5 + 3.0, rtol=1e-6)
    loss_sum, _, _ = grpo(logp_BT, rollout_BT, jnp.array([1.0]), jnp.ones((1, 3)), **bounds)
    np.testing.assert_allclose(loss_sum, -(0.5 + 1.1 + 1.1), rtol=1e-6)
    assert terms["policy/capped_share"] == 1


def _grpo_float64(logp_BT, rollout_BT, advantage_B, mask_BT):
    """The formula of the docstring in float64 numpy."""
    advantage_B1 = advantage_B[:, None]
    r_BT = np.minimum(np.exp(logp_BT - rollout_BT), 5.0)
    objective_BT = np.minimum(r_BT * advantage_B1, np.clip(r_BT, 0.8, 1.28) * advantage_B1)
    return -np.sum(objective_BT * mask_BT)


def test_gradient_equals_finite_differences():
    rng = np.random.default_rng(0)
    rollout_BT = -rng.exponential(1.0, (6, 8))
    logp_BT = rollout_BT + rng.normal(0.0, 1.0, (6, 8))
    advantage_B = rng.normal(size=6)
    mask_BT = (rng.random((6, 8)) < 0.7).astype(np.float64)
    ratio_BT = np.exp(logp_BT - rollout_BT)
    assert ratio_BT.min() < 0.8 < 5.0 < ratio_BT.max()  # every branch is visited

    step = 1e-6
    expected_BT = np.zeros_like(logp_BT)
    for index in np.ndindex(*logp_BT.shape):
        nudge_BT = np.zeros_like(logp_BT)
        nudge_BT[index] = step
        up = _grpo_float64(logp_BT + nudge_BT, rollout_BT, advantage_B, mask_BT)
        down = _grpo_float64(logp_BT - nudge_BT, rollout_BT, advantage_B, mask_BT)
        expected_BT[index] = (up - down) / (2 * step)

    data = jnp.array(rollout_BT), jnp.array(advantage_B), jnp.array(mask_BT)
    grad_BT = jax.grad(lambda logp_BT: grpo(logp_BT, *data)[0])(jnp.array(logp_BT, jnp.float32))
    np.testing.assert_allclose(grad_BT, expected_BT, rtol=1e-4, atol=1e-6)


def test_on_policy_the_ratio_is_one_and_the_gradient_is_the_policy_gradient():
    logp_BT = -jax.random.exponential(jax.random.key(1), (4, 5))
    advantage_B = jnp.array([1.5, -0.5, 0.0, -2.0])
    mask_BT = jnp.ones((4, 5)).at[2, 3:].set(0.0)

    loss_sum, count, terms = grpo(logp_BT, logp_BT, advantage_B, mask_BT)
    grad_BT = jax.grad(lambda x_BT: grpo(x_BT, logp_BT, advantage_B, mask_BT)[0])(logp_BT)

    assert count == 18
    assert terms["policy/importance_ratio"] == count
    assert terms["policy/clipped_share"] == terms["policy/capped_share"] == 0
    np.testing.assert_array_equal(grad_BT, -advantage_B[:, None] * mask_BT)
    np.testing.assert_allclose(loss_sum, -np.sum(advantage_B[:, None] * mask_BT), rtol=1e-6)


def test_only_the_trainer_gets_a_gradient():
    logp_BT, rollout_BT = _row(-1.0, -2.0), _row(-1.1, -1.9)
    grads = jax.grad(lambda r_BT, a_B: grpo(logp_BT, r_BT, a_B, jnp.ones((1, 2)))[0], (0, 1))(
        rollout_BT, jnp.array([1.0])
    )
    for grad in grads:
        np.testing.assert_array_equal(grad, np.zeros_like(grad))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(advantage):
    logp_BT = _row(-1e4, 0.0, -1e30, -np.inf)
    rollout_BT = _row(0.0, -1e4, 0.0, 0.0)

    def loss(logp_BT):
        return grpo(logp_BT, rollout_BT, jnp.array([advantage]), jnp.ones((1, 4)))

    loss_sum, _, terms = loss(logp_BT)
    grad_BT = jax.grad(lambda logp_BT: loss(logp_BT)[0])(logp_BT)
    assert np.all(np.isfinite([loss_sum, terms["policy/importance_ratio"]]))
    assert np.all(np.isfinite(grad_BT))


@pytest.mark.parametrize("junk", [np.nan, -np.inf, np.inf, 1e30, -1e30])
def test_padding_changes_nothing(junk):
    def pad(x_BT, value):  # a prompt token before, three padding tokens and a whole sequence after
        return jnp.pad(x_BT, ((0, 1), (1, 3)), constant_values=value)

    def grpo_and_grad(logp_BT, rollout_BT, advantage_B, mask_BT):
        result = grpo(logp_BT, rollout_BT, advantage_B, mask_BT)
        grad_BT = jax.grad(lambda x_BT: grpo(x_BT, rollout_BT, advantage_B, mask_BT)[0])(logp_BT)
        return result, grad_BT

    logp_BT, rollout_BT = _row(-1.0, -2.0, -0.5), _row(-1.3, -1.0, -0.5)
    mask_BT = jnp.ones((1, 3))
    narrow, grad_BT = grpo_and_grad(logp_BT, rollout_BT, jnp.array([-1.5]), mask_BT)
    wide, wide_grad_BT = grpo_and_grad(
        pad(logp_BT, junk), pad(rollout_BT, junk), jnp.array([-1.5, junk]), pad(mask_BT, 0)
    )
    assert wide == narrow
    np.testing.assert_array_equal(wide_grad_BT, pad(grad_BT, 0))

    assert cross_entropy(pad(logp_BT, junk), pad(mask_BT, 0)) == cross_entropy(logp_BT, mask_BT)
    ce_grad_BT = jax.grad(lambda x_BT: cross_entropy(x_BT, pad(mask_BT, 0))[0])(pad(logp_BT, junk))
    np.testing.assert_array_equal(ce_grad_BT, -pad(mask_BT, 0))


def test_sums_over_micro_batches_add_up_to_the_global_batch():
    keys = jax.random.split(jax.random.key(2), 3)
    logp_BT = -jax.random.exponential(keys[0], (8, 6))
    rollout_BT = logp_BT + jax.random.normal(keys[1], (8, 6))
    advantage_B = jax.random.normal(keys[2], (8,))
    mask_BT = (jnp.arange(6)[None, :] < jnp.arange(8)[:, None]).astype(jnp.float32)

    whole = grpo(logp_BT, rollout_BT, advantage_B, mask_BT)
    parts = [
        grpo(logp_BT[rows], rollout_BT[rows], advantage_B[rows], mask_BT[rows])
        for rows in (slice(0, 3), slice(3, 8))
    ]
    added = jax.tree.map(lambda a, b: a + b, *parts)
    assert whole[1] == mask_BT.sum() == 27
    for total, summed in zip(jax.tree.leaves(whole), jax.tree.leaves(added), strict=True):
        assert (total.dtype, total.shape) == (jnp.float32, ())
        np.testing.assert_allclose(total, summed, rtol=1e-5)


def test_an_empty_mask_is_a_sum_and_count_of_zero():
    loss_sum, count, terms = grpo(_row(np.nan), _row(0.0), jnp.array([1.0]), jnp.zeros((1, 1)))
    assert (loss_sum, count, *terms.values()) == (0, 0, 0, 0, 0)


def test_a_weight_scales_a_tokens_loss_and_gradient():
    logp_BT, mask_BT = jnp.log(_row(0.9, 2.0, 1.1)), jnp.ones((1, 3))
    run = lambda logp_BT: grpo(
        logp_BT, jnp.zeros((1, 3)), jnp.array([1.0]), mask_BT, _row(0.5, 3.0, 0.0)
    )
    loss_sum, count, terms = run(logp_BT)
    np.testing.assert_allclose((loss_sum, count), (-(0.45 + 3 * 1.28), 3), rtol=1e-6)
    assert terms["policy/clipped_share"] == 1
    gradient_BT = jax.grad(lambda logp_BT: run(logp_BT)[0])(logp_BT)
    np.testing.assert_allclose(gradient_BT, [[-0.45, 0, 0]], rtol=1e-6)


# -- of sequences ----------------------------------------------------------------------------------

# Ratios of three sequences of 3, 2 and 2 tokens; their geometric means are 1, 2 and 0.5.
RATIO_BT = jnp.array([[2.0, 0.5, 1.0], [4.0, 1.0, 9.0], [0.25, 1.0, 9.0]])
SEQUENCE_MASK_BT = jnp.array([[1.0, 1, 1], [1, 1, 0], [1, 1, 0]])
WIDE = {gspo: {"clip_low": 0.2, "clip_high": 0.28}, tbpo: {"low": 0.8, "high": 1.28}}


def _of_sequences(loss, advantage, weight_BT=1.0, **bounds):
    """(loss_sum, grad_BT, count, terms) of the three sequences above."""

    def run(logp_BT):
        advantage_B = jnp.full(3, advantage)
        loss_sum, *rest = loss(
            logp_BT, jnp.full((3, 3), -1.0), advantage_B, SEQUENCE_MASK_BT, weight_BT,
            **(bounds or WIDE[loss]),
        )  # fmt: skip
        return loss_sum, rest

    (loss_sum, rest), grad_BT = jax.value_and_grad(run, has_aux=True)(jnp.log(RATIO_BT) - 1)
    return loss_sum, grad_BT, *rest


@pytest.mark.parametrize(
    ("loss", "advantage", "surrogate_B", "live_B", "clipped"),
    [
        # s = 1, 2, 0.5; clip [0.8, 1.28], pessimistic
        (gspo, 1.0, (1, 1.28, 0.5), (1, 0, 0.5), 1),
        (gspo, -3.0, (1, 2, 0.8), (1, 2, 0), 1),
        # band [0.8, 1.28], on both sides whatever the sign
        (tbpo, 1.0, (1, 0, 0), (1, 0, 0), 2),
        (tbpo, -3.0, (1, 0, 0), (1, 0, 0), 2),
    ],
)
def test_three_sequences_by_hand(loss, advantage, surrogate_B, live_B, clipped):
    """A live sequence passes -A s to its tokens, each an equal share."""
    loss_sum, grad_BT, count, terms = _of_sequences(loss, advantage)
    np.testing.assert_allclose(loss_sum, -advantage * sum(surrogate_B), rtol=1e-5)
    tokens_B1 = np.sum(SEQUENCE_MASK_BT, axis=1, keepdims=True)
    expected_BT = -advantage * np.array(live_B)[:, None] * SEQUENCE_MASK_BT / tokens_B1
    np.testing.assert_allclose(grad_BT, expected_BT, rtol=1e-5)
    np.testing.assert_allclose(count, 3, rtol=1e-6)
    np.testing.assert_allclose(terms["policy/importance_ratio"], 3.5, rtol=1e-5)
    np.testing.assert_allclose(terms["policy/clipped_share"], clipped, rtol=1e-6)


@pytest.mark.parametrize("loss", [gspo, tbpo])
def test_a_weight_of_zero_silences_a_token_of_a_sequence(loss):
    """Of the first sequence, s = 1: -A (0 + 3 + 1.5) / 3, and the gradient falls as the loss."""
    weight_BT = jnp.zeros((3, 3)).at[0].set(jnp.array([0.0, 3.0, 1.5]))
    loss_sum, grad_BT, _, _ = _of_sequences(loss, 2.0, weight_BT)
    np.testing.assert_allclose(loss_sum, -2 * 1.5, rtol=1e-5)
    np.testing.assert_allclose(grad_BT[0], [0, -2, -1], rtol=1e-5)
    assert not np.any(grad_BT[1:])


def test_the_gradient_of_gspo_equals_finite_differences():
    """Of the sequence form of the docstring, in float64."""
    rng = np.random.default_rng(0)
    mask_BT = (np.arange(6) < rng.integers(1, 7, (8, 1))).astype(np.float64)
    logp_BT, advantage_B = rng.normal(0, 0.5, (8, 6)), rng.normal(size=8)

    def by_hand(logp_BT):
        s_B = np.exp(np.sum(logp_BT * mask_BT, 1) / np.sum(mask_BT, 1))
        clipped_B = np.clip(s_B, 0.8, 1.28)
        return -np.sum(np.minimum(s_B * advantage_B, clipped_B * advantage_B))

    expected_BT, step = np.zeros_like(logp_BT), 1e-6
    for index in np.ndindex(*logp_BT.shape):
        nudge_BT = np.zeros_like(logp_BT)
        nudge_BT[index] = step
        expected_BT[index] = (by_hand(logp_BT + nudge_BT) - by_hand(logp_BT - nudge_BT)) / 2 / step
    run = lambda logp_BT: gspo(
        logp_BT, jnp.zeros((8, 6)), jnp.asarray(advantage_B), jnp.asarray(mask_BT), **WIDE[gspo]
    )[0]
    value, grad_BT = jax.value_and_grad(run)(jnp.asarray(logp_BT, jnp.float32))
    np.testing.assert_allclose(value, by_hand(logp_BT), rtol=1e-5)
    np.testing.assert_allclose(grad_BT, expected_BT, rtol=1e-4, atol=1e-6)


def test_cross_entropy_by_hand():
    loss_sum, count = cross_entropy(_row(np.log(0.5), np.log(0.25), -7.0), _row(1.0, 1.0, 0.0))
    np.testing.assert_allclose(loss_sum, 3 * np.log(2.0), rtol=1e-6)
    assert count == 2
    assert loss_sum.dtype == count.dtype == jnp.float32


def test_bfloat16_log_probs_are_summed_in_float32():
    logp_BT = jnp.full((1, 1000), -1.0, jnp.bfloat16)
    mask_BT = jnp.ones((1, 1000), jnp.bfloat16)
    assert cross_entropy(logp_BT, mask_BT) == (1000.0, 1000.0)
    loss_sum, count, _ = grpo(logp_BT, logp_BT, jnp.array([-1.0]), mask_BT)
    assert (loss_sum, count) == (1000.0, 1000.0)
