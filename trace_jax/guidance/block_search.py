"""Parity checks over blocks of 16 values, decoded by trying every set of the most doubtful ones.

The columns of the check matrix (the checks that a value is in, as a binary word) are all different
and of odd weight, so that two errors never look like one: distance 4, as of an extended Hamming
code, where distinct columns alone have 3. Words are taken in ascending order unless three taken
ones add up to them, as far as that goes (a lexicode: Conway and Sloane 1986); then the others.

Letters: n values of a row, m checks, k checks of a block.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 16
CANDIDATES = 5  # the most doubtful values of a block: 2^5 sets are tried


@functools.lru_cache
def columns(k: int) -> np.ndarray:
    """The words of k bits, int [16], that say in which checks each value of a block is."""
    words = [word for word in range(2**k) if word.bit_count() % 2]
    taken, sums = [], set()  # sums of three that are taken
    for word in words:
        if word not in sums and len(taken) < BLOCK:
            sums |= {word ^ a ^ b for i, a in enumerate(taken) for b in taken[:i]}
            taken.append(word)
    rest = [word for word in words if word not in taken]
    return np.array((taken + rest)[:BLOCK])


@functools.lru_cache
def code(n: int, m: int) -> tuple[np.ndarray, int]:
    """(values of each check int [m, d], filled up with n; checks of a block) of a row of n."""
    k = m // (n // BLOCK)
    members = [
        [start + i for i, word in enumerate(columns(k)) if word >> check & 1]
        for start in range(0, n, BLOCK)
        for check in range(k)
    ]
    members += [[]] * (m - len(members))  # what does not go round is not used
    degree = max(map(len, members))
    return np.array([row + [n] * (degree - len(row)) for row in members]), k


def flips(doubt: jax.Array, differs: jax.Array) -> jax.Array:
    """Bool [..., n]: in each block the likeliest set of its CANDIDATES that explains `differs`.

    doubt float32 [..., n] and differs uint8 [..., m] as in `syndrome.flips`.
    """
    n, m = doubt.shape[-1], differs.shape[-1]
    _, k = code(n, m)
    blocks, words = n // BLOCK, jnp.asarray(columns(k), jnp.int32)
    place = jnp.arange(BLOCK).reshape(BLOCK, *[1] * doubt.ndim)
    # Values, bits and blocks lead, so that everything below runs along rows.
    lead = lambda a, inner: jnp.moveaxis(a.reshape(*a.shape[:-1], blocks, inner), (-1, -2), (0, 1))
    doubt = lead(doubt, BLOCK)
    bits = lead(differs[..., : blocks * k].astype(jnp.int32), k)
    wanted = jnp.sum(bits << jnp.arange(k).reshape(k, *[1] * (bits.ndim - 1)), axis=0)

    # Doubts as integers, in the same order, their last bits replaced by the place in the block.
    key = jax.lax.bitcast_convert_type(doubt, jnp.int32) & -BLOCK | place
    candidates = []  # (place, doubt, word), the most doubtful first
    for _ in range(CANDIDATES):
        least = jnp.min(key, axis=0)
        at = least & (BLOCK - 1)
        doubt_of = jax.lax.bitcast_convert_type(least & -BLOCK, jnp.float32)
        candidates.append((at, doubt_of, words[at]))
        key = jnp.where(key == least, jnp.iinfo(jnp.int32).max, key)

    chosen = jnp.zeros_like(wanted)  # a bit for each candidate
    cost = jnp.where(wanted == 0, 0.0, jnp.inf)
    total, word, subset = jnp.zeros_like(cost), wanted, 0
    for step in range(1, 2**CANDIDATES):  # in Gray's order: one candidate enters or leaves
        turned = (step & -step).bit_length() - 1
        subset ^= 1 << turned
        _, doubt_of, word_of = candidates[turned]
        total = total + doubt_of if subset >> turned & 1 else total - doubt_of
        word = word ^ word_of
        better = (word == 0) & (total < cost)
        cost, chosen = jnp.where(better, total, cost), jnp.where(better, subset, chosen)

    # Apart: fused into what follows, the search would be done once for each value of a block.
    chosen = jax.lax.optimization_barrier(chosen)
    flipped = jnp.zeros(doubt.shape, bool)
    for i, (at, _, _) in enumerate(candidates):
        flipped |= (place == at) & (chosen >> i & 1 == 1)
    flipped = jnp.moveaxis(flipped, (0, 1), (-1, -2))
    return flipped.reshape(*flipped.shape[:-2], n)
