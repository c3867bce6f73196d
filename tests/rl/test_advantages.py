"""Group-normalised advantages against hand-computed groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl.advantages import group_normalised


def test_hand_computed_groups():
    reward_QG = jnp.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 4.0]])
    advantage_QG, keep_QG = group_normalised(reward_QG, drop_zero_variance=True)
    # Means 0.5 and 1; population stds 0.5 and sqrt(3).
    root3 = np.sqrt(3.0)
    expected_QG = [[1, -1, -1, 1], [-1 / root3, -1 / root3, -1 / root3, 3 / root3]]
    np.testing.assert_allclose(advantage_QG, expected_QG, rtol=3e-6)
    np.testing.assert_array_equal(keep_QG, np.ones((2, 4)))
    assert advantage_QG.dtype == keep_QG.dtype == jnp.float32


def test_epsilon_is_added_to_the_standard_deviation():
    advantage_QG, _ = group_normalised(jnp.array([[1e-6, -1e-6]]), drop_zero_variance=True)
    np.testing.assert_allclose(advantage_QG, [[0.5, -0.5]], rtol=1e-5)


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7e8])
def test_equal_rewards_give_zero_advantage_and_are_kept_or_dropped(drop, value):
    reward_QG = jnp.array([[value] * 7, [0, 1, 0, 1, 0, 1, 0]])
    advantage_QG, keep_QG = group_normalised(reward_QG, drop_zero_variance=drop)
    np.testing.assert_array_equal(advantage_QG[0], np.zeros(7))
    np.testing.assert_array_equal(keep_QG, [[0.0 if drop else 1.0] * 7, [1.0] * 7])
    assert np.all(advantage_QG[1] != 0)


def test_a_single_completion_has_no_siblings():
    advantage_QG, keep_QG = group_normalised(jnp.array([[1.0], [0.0]]), drop_zero_variance=True)
    np.testing.assert_array_equal(advantage_QG, np.zeros((2, 1)))
    np.testing.assert_array_equal(keep_QG, np.zeros((2, 1)))


def test_groups_do_not_see_each_other_and_shift_and_scale_cancel():
    reward_QG = jax.random.normal(jax.random.key(0), (5, 8))
    advantage_QG, _ = group_normalised(reward_QG, drop_zero_variance=False)
    moved_QG, _ = jax.jit(group_normalised, static_argnums=1)(4.0 * reward_QG + 2.0, False)
    alone_1G, _ = group_normalised(reward_QG[3:4], drop_zero_variance=False)
    np.testing.assert_allclose(moved_QG, advantage_QG, atol=1e-5)
    np.testing.assert_array_equal(alone_1G[0], advantage_QG[3])


def test_integer_rewards():
    advantage_QG, _ = group_normalised(jnp.array([[0, 2]]), drop_zero_variance=True)
    np.testing.assert_allclose(advantage_QG, [[-1.0, 1.0]], rtol=3e-6)
