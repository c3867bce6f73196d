"""A low-density parity-check code over a whole row, decoded by min-sum message passing.

Each value is in three checks, and no two values share more than one check where that is possible
(Gallager 1962). Checks and values then tell each other in rounds how sure they are of a flip; the
check's answer to a value is the least sure of its other values (Chen and Fossorier 2002). Few
errors take two or three rounds.

Letters: n values, m checks, d values of a check.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np

WEIGHT = 3  # checks a value is in
TRIALS = 8  # of placing a value
ROUNDS = 16
DAMPING = 0.8  # of a message: min-sum overstates what a check knows
LARGE = 1e9  # stands for infinity where infinities could meet with opposite signs


@functools.lru_cache
def code(n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """(values of each check int [m, d], places of each value int [n, 3]) of n values in m checks.

    Checks are filled up with n, a value that does not exist. A place is an index into the first
    array, flattened. Greedy: each value takes the emptiest checks that no earlier value holds
    together, so that cycles of length four appear only where m is too small to avoid them. A
    function of n and m alone: both sides must come to the same code.
    """
    filled = np.zeros(m)
    together = np.zeros((m, m))  # values that two checks share
    taken = collections.Counter()  # sets of checks that were given to a value
    members = np.zeros((n, WEIGHT), int)
    for value in range(n):
        best = np.inf
        for trial in range(TRIALS):
            chosen = _emptiest(filled, together, salt=TRIALS * value + trial)
            clashes = together[np.ix_(chosen, chosen)].sum() + n * taken[tuple(chosen)]
            if clashes < best:
                best, members[value] = clashes, chosen
            if not clashes:
                break
        own = members[value]
        taken[tuple(own)] += 1
        filled[own] += 1
        together[np.ix_(own, own)] += 1 - np.eye(WEIGHT)
    checks = np.full((m, int(filled.max())), n)
    places = np.zeros((n, WEIGHT), int)
    room = np.zeros(m, int)
    for value in range(n):
        places[value] = members[value] * checks.shape[1] + room[members[value]]
        checks.reshape(-1)[places[value]] = value
        room[members[value]] += 1
    return checks, places


def _emptiest(filled, together, salt):
    """WEIGHT checks, ascending: the emptiest, sharing no value where possible; ties by a hash."""
    tie = (np.arange(1, len(filled) + 1) * 2654435761 + salt * 2246822519) % 2**32 / 2**32
    chosen = []
    for _ in range(WEIGHT):
        cost = filled + tie + len(filled) * 2**16 * together[chosen].sum(axis=0)
        cost[chosen] = np.inf
        chosen.append(int(np.argmin(cost)))
        tie = tie * 69069 % 1
    return sorted(chosen)


def members(values_n: jax.Array, checks: np.ndarray, absent: float) -> jax.Array:
    """[m, d, ...]: the values [n, ...] in each check, `absent` where it has fewer than d."""
    room = jnp.full((1, *values_n.shape[1:]), absent, values_n.dtype)
    return jnp.concatenate([values_n, room])[checks]


def parities(bits_n: jax.Array, checks: np.ndarray) -> jax.Array:
    """Uint8 [m, ...]: the parity of each check over bits uint8 [n, ...]."""
    return (jnp.sum(members(bits_n, checks, 0), axis=1) & 1).astype(jnp.uint8)


def flips(doubt: jax.Array, differs: jax.Array) -> jax.Array:
    """Bool [..., n]: a set that explains `differs`; nothing in rows without one in ROUNDS rounds.

    doubt float32 [..., n] and differs uint8 [..., m] as in `syndrome.flips`. Stops when every row
    is explained.
    """
    n, m = doubt.shape[-1], differs.shape[-1]
    checks, places = code(n, m)
    doubt_n, differs_m = jnp.moveaxis(doubt, -1, 0), jnp.moveaxis(differs, -1, 0)
    exists = np.expand_dims(checks < n, tuple(range(2, doubt_n.ndim + 1)))
    wanted = jnp.where(differs_m == 1, -1.0, 1.0)[:, None]

    def decide(message):
        belief_n = doubt_n + jnp.sum(message.reshape(-1, *doubt_n.shape[1:])[places], axis=1)
        wrong_m = parities((belief_n < 0).astype(jnp.uint8), checks) != differs_m
        return belief_n, jnp.any(wrong_m, axis=0)

    def undecided(state):
        round_, _, _, wrong = state
        return (round_ < ROUNDS) & jnp.any(wrong)

    def one_round(state):
        round_, message, belief_n, _ = state
        told = members(belief_n, checks, jnp.inf) - message  # without what the check itself said
        size = jnp.abs(told)
        least = jnp.min(size, axis=1, keepdims=True)
        is_least = size == least
        second = jnp.min(jnp.where(is_least, jnp.inf, size), axis=1, keepdims=True)
        alone = jnp.sum(is_least, axis=1, keepdims=True) == 1
        odd = jnp.sum(told < 0, axis=1, keepdims=True) & 1
        sign = jnp.where((told < 0) ^ (odd == 1), -1.0, 1.0) * wanted  # of the others' product
        others = jnp.where(is_least & alone, second, least)
        message = jnp.where(exists, DAMPING * sign * jnp.minimum(others, LARGE), 0)
        return round_ + 1, message, *decide(message)

    silence = jnp.zeros((*checks.shape, *doubt_n.shape[1:]), jnp.float32)
    start = (jnp.int32(0), silence, *decide(silence))
    _, _, belief_n, wrong = jax.lax.while_loop(undecided, one_round, start)
    return jnp.moveaxis((belief_n < 0) & ~wrong, 0, -1)
