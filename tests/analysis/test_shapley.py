"""Shapley values of small games by hand, and what holds for every game."""

import itertools

import numpy as np
import pytest

from trace_jax.analysis import shapley

GLOVES = np.array([0, 0, 0, 1, 0, 1, 0, 1])  # a has a left glove, b and c a right one; pairs count


def test_two_players_by_hand():
    """a alone makes 10, b alone 2, together 20: a adds 10 or 18, b adds 2 or 10."""
    values = np.array([0, 10, 2, 20])
    assert shapley.shares(values).tolist() == [14, 6]
    assert shapley.alone(values).tolist() == [10, 2]
    assert shapley.last(values).tolist() == [18, 10]


def test_three_players_by_hand():
    """Of the six orders a completes a pair in four, b and c in one each."""
    assert shapley.shares(GLOVES) == pytest.approx([4 / 6, 1 / 6, 1 / 6])
    assert shapley.alone(GLOVES).tolist() == [0, 0, 0]
    assert shapley.last(GLOVES).tolist() == [1, 0, 0]


def test_coalitions_come_in_the_order_of_values():
    assert shapley.coalitions("ab") == [
        frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")
    ]  # fmt: skip


def brute_force(values, players):
    """The mean over all orders, written as the definition says."""
    index = {coalition: i for i, coalition in enumerate(shapley.coalitions(range(players)))}
    added = np.zeros((players, *values.shape[1:]))
    orders = list(itertools.permutations(range(players)))
    for order in orders:
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            added[player] += values[index[before | {player}]] - values[index[before]]
    return added / len(orders)


@pytest.mark.parametrize("players", [1, 2, 3, 4, 5])
def test_every_game(players):
    rng = np.random.default_rng(players)
    values, other = rng.normal(size=(2, 2**players, 7))
    found = shapley.shares(values)
    np.testing.assert_allclose(found, brute_force(values, players))
    np.testing.assert_allclose(found.sum(axis=0), values[-1] - values[0])  # draw by draw
    np.testing.assert_allclose(
        shapley.shares(values + 3 * other), found + 3 * shapley.shares(other)
    )


def test_who_changes_nothing_gets_nothing_and_equals_get_the_same():
    values = np.array([len(c & {"a", "b"}) ** 2 for c in shapley.coalitions("abc")])
    assert shapley.shares(values).tolist() == [2, 2, 0]


def test_an_additive_game_is_what_each_does_alone():
    values = np.array([5 + sum({"a": 1, "b": 2, "c": 4}[p] for p in c)
                       for c in shapley.coalitions("abc")])  # fmt: skip
    for found in (shapley.shares(values), shapley.alone(values), shapley.last(values)):
        assert found == pytest.approx([1, 2, 4])


def test_the_interval_is_that_of_the_mean():
    draws = np.random.default_rng(0).normal(size=(2, 400)) * [[1], [10]] + [[0], [100]]
    low, high = shapley.interval(draws)
    mean, error = draws.mean(axis=1), draws.std(axis=1) / 20
    np.testing.assert_allclose(high - mean, 1.96 * error, rtol=0.1)
    np.testing.assert_allclose(mean - low, 1.96 * error, rtol=0.1)
    assert shapley.interval(np.array([[3.0]])).tolist() == [[3.0], [3.0]]


def test_a_coalition_is_missing():
    with pytest.raises(ValueError, match="values of 3 coalitions: give those of all"):
        shapley.shares(np.zeros(3))
