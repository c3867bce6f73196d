"""Guidance below one bit a value: parity checks over a row's low bits, decoded like a noisy code.

The trainer knows nearly every low bit of the rollout; in doubt are the values near a midpoint. So
the rollout sends no bits but the parities of some sets of them (source coding with side
information: Slepian and Wolf 1973). Where the trainer's own parities differ, it flips the likeliest
set of its bits that makes them agree.

    rows from 128 values on   one code spans the row: guidance/min_sum.py
    shorter rows              blocks of 32 values (16 in a row of 16): guidance/block_search.py
Blocks are cheap to decode, but chance puts more errors into one block than its checks can tell
apart; over a long row that averages out. Measured at 3/16 check a value, of the codes that 1% of
noise changes: blocks of 32 leave 5%, a row of 2,048 leaves none (docs/results.md).
"""

import jax

from trace_jax.guidance import block_search, min_sum

LONG = 128  # values of a row


def in_blocks(n: int) -> bool:
    """Whether a row of n values is coded in blocks."""
    return n < LONG and (n % block_search.BLOCK == 0 or n == block_search.SMALL_BLOCK)


def parities(bits: jax.Array, m: int) -> jax.Array:
    """The m parities, uint8 [..., m], of low bits uint8 [..., n]."""
    n = bits.shape[-1]
    checks, _ = (block_search if in_blocks(n) else min_sum).code(n, m)
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
    decode = block_search.flips if in_blocks(n) else min_sum.flips
    # One axis of rows: the innermost loops then run along all of them.
    return decode(doubt.reshape(-1, n), differs.reshape(-1, m)).reshape(doubt.shape)
