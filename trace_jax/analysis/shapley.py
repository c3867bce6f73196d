"""Who caused how much of what happened together: Shapley values, exact, with a bootstrap.

A game gives every coalition S of n players a value v(S). A player's share is what it adds to the
players before it, averaged over all orders in which the n may come:

    share_i = sum over S without i of |S|! (n - 1 - |S|)! / n! * (v(S + i) - v(S))

The shares add up to v(all) - v(none), whatever the interactions; a player that never changes
anything gets 0; shares of a sum of games are sums of shares. Source: Shapley, A value for n-person
games, 1953. Values come as an array whose first axis counts coalitions: bit i of its index says
whether player i is in. Letters: S coalitions (2^n), N players, Q draws.
"""

import math
from collections.abc import Sequence

import numpy as np


def coalitions(players: Sequence[str]) -> list[frozenset[str]]:
    """Every set of players, in the order of the first axis of values."""
    count = len(players)
    return [
        frozenset(player for i, player in enumerate(players) if index >> i & 1)
        for index in range(2**count)
    ]


def shares(values_SQ: np.ndarray) -> np.ndarray:
    """The Shapley value of each player, float64 [N, ...], from values [2^N, ...]."""
    players = _players(values_SQ)
    index_S = np.arange(len(values_SQ))
    size_S = np.bitwise_count(index_S).astype(int)
    weight = [
        math.factorial(size) * math.factorial(players - 1 - size) / math.factorial(players)
        for size in range(players)
    ]
    found = []
    for i in range(players):
        without = index_S[index_S >> i & 1 == 0]
        added = np.asarray(values_SQ[without | 1 << i] - values_SQ[without], np.float64)
        found.append(np.tensordot(np.array(weight)[size_S[without]], added, axes=1))
    return np.array(found)


def alone(values_SQ: np.ndarray) -> np.ndarray:
    """What each player adds to nobody, [N, ...]."""
    first = 1 << np.arange(_players(values_SQ))
    return values_SQ[first] - values_SQ[0]


def last(values_SQ: np.ndarray) -> np.ndarray:
    """What is lost when each player leaves all the others, [N, ...]."""
    everyone = len(values_SQ) - 1
    return values_SQ[everyone] - values_SQ[everyone ^ 1 << np.arange(_players(values_SQ))]


def interval(draws_NQ: np.ndarray, seed: int = 0, resamples: int = 2000) -> np.ndarray:
    """Float64 [2, N]: from where to where the mean over Q lies in 95% of bootstrap resamples.

    Rows are resampled together. One draw has no spread: both ends are then its value.
    """
    count = draws_NQ.shape[-1]
    picked = np.random.default_rng(seed).integers(0, count, (resamples, count))
    times = np.stack([np.bincount(row, minlength=count) for row in picked]) / count
    return np.quantile(times @ draws_NQ.T, (0.025, 0.975), axis=0)


def _players(values_SQ: np.ndarray) -> int:
    """N. Raises ValueError where the values are not those of all coalitions."""
    players = len(values_SQ).bit_length() - 1
    if len(values_SQ) != 2**players:
        raise ValueError(
            f"values of {len(values_SQ)} coalitions: give those of all, 2^N for N players"
        )
    return players
