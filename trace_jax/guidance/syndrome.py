"""Guidance below one bit a value: parity checks over a row's low bits, decoded like a noisy code.

The trainer knows nearly every low bit of the rollout; in doubt are the values near a midpoint. So
the rollout sends no bits but the parities of some sets of them (source coding with side
information: Slepian and Wolf 1973). Where the trainer's own parities differ, it flips the likeliest
set of its bits that makes them agree.

    rows from 128 values on   one code spans the row: guidance/min_sum.py
    shorter rows              blocks of 16 values: guidance/block_search.py
Chance puts more errors into a short block than its checks can tell apart; over a long row that
averages out, and fewer checks do. Of the codes that 1% of noise changes, blocks of 16 with 7 checks
leave 1%, blocks of 32 with 6 leave 6%, and a row of 2,048 with 3 checks for 16 values leaves none
(docs/results.md).
"""

import jax

from trace_jax.guidance import block_search, min_sum

LONG = 128  # values of a row


def _of(n):
    return min_sum if n >= LONG else block_search


def parities(bits: jax.Array, m: int) -> jax.Array:
    """The m parities, uint8 [..., m], of low bits uint8 [..., n]."""
    n = bits.shape[-1]
    checks, _ = _of(n).code(n, m)
    # Apart: fused into the sums, what made the bits would be computed once for each check.
    bits_n = jax.lax.optimization_barrier(bits.reshape(-1, n).T)
    return min_sum.parities(bits_n, checks).T.reshape(*bits.shape[:-1], m)


def flips(doubt: jax.Array, differs: jax.Array) -> jax.Array:
    """Which low bits to flip, bool [..., n]: the likeliest set that explains the parities.

    Where none is found nothing is flipped: those values round to nearest.

    Args:
        doubt: float32 [..., n] >= 0, how unlikely it is that a value's bit is wrong, on any scale
            common to the row: the log-likelihood ratio up to a factor.
        differs: uint8 [..., m], 1 where the recorded parity is not that of the bits as they are.
    """
    n, m = doubt.shape[-1], differs.shape[-1]
    # One axis of rows: the innermost loops then run along all of them.
    return _of(n).flips(doubt.reshape(-1, n), differs.reshape(-1, m)).reshape(doubt.shape)
