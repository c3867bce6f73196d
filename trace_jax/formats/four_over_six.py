"""4/6: NVFP4 in which each block's largest value becomes 6 or 4, whichever leaves less error.

E2M1 has nothing between 4 and 6, so what lies just below a block's largest value fares worst. Where
the largest becomes 4, the next steps down are 3 and 2, and the block scale is 1.5 times as large;
the outer scale leaves it room by bringing the largest block scale to 256 instead of 448. Codes,
scales and decoding are NVFP4's. The order of operations, in float32:

    S       = min(1536 / amax, FMAX), or 1 where amax or S is 0      1536 = 6 * 256
    outer   = 1 / S
    base    = block_amax / 6 * S                                     divided first, unlike nvfp4
    scale_6 = e4m3(min(base, 448)),  scale_4 = e4m3(min(1.5 * base, 448))
    error_k = sum of (e2m1(x * min(1 / (scale_k * outer), FMAX)) * scale_k - x * S)^2
    scale   = scale_4 where error_4 < error_6, else scale_6
The sum runs over the block's values in order. All but the unit of the error is Transformer
Engine's, which multiplies e2m1 * scale by amax / 1536 first. In units of the outer scale the error
needs no amax (where the outer scale is given there is none), e2m1 * scale is exact, so that equal
candidates tie, and rows however small lose no square to underflow.
Source: 4/6 (arXiv 2512.02010), method.md 2.14.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.formats import block_scaled, e2m1, e4m3, nvfp4
from trace_jax.formats.block_scaled import FLOAT32_MAX, BlockScaled

NAME = "nvfp4_4over6"
LARGEST_SCALE = 256.0  # what the outer scale brings block scales to; times 1.5 it still fits
RANGE = e2m1.MAX * LARGEST_SCALE


def scales_of(x: jax.Array, outer: str | jax.Array = "row") -> tuple[jax.Array, jax.Array]:
    """Block scales float8_e4m3fn [..., n/16] and outer (decoding) scale float32 of x [..., n].

    `outer` and errors as in `nvfp4.scales_of`.
    """
    x = block_scaled.to_float32(x)
    blocks = block_scaled.split_blocks(x, nvfp4.BLOCK)
    magnitude = block_scaled.largest_magnitude(blocks)
    encoding, outer = nvfp4.outer_scales(magnitude, outer, RANGE)
    encoding = block_scaled.expand_prefix(encoding, magnitude.ndim)
    # By an array behind a barrier: XLA turns a division by one number into a multiplication.
    six = jax.lax.optimization_barrier(jnp.full(magnitude.shape, np.float32(6)))
    base = magnitude / six * encoding
    candidates = (_rounded(base), _rounded(np.float32(1.5) * base))
    # Apart, as the products below: fused with the difference or the sum that follows, they would
    # not be rounded on their own.
    (six, four), outer, seen = jax.lax.optimization_barrier(
        (candidates, outer, blocks * encoding[..., None])
    )
    better = _error(x, seen, four, outer) < _error(x, seen, six, outer)
    return jnp.where(better, four, six), outer


def _rounded(scale):
    """E4M3, clamped before the cast."""
    clamped = jnp.minimum(jnp.minimum(scale, FLOAT32_MAX), e4m3.MAX)
    return clamped.astype(jnp.float8_e4m3fn)


def _error(x, seen, scales, outer):
    """Squared error float32 [..., n/16] of x rounded under block scales, in units of the outer."""
    codes = e2m1.encode(block_scaled.normalise(x, scales, outer))
    values = block_scaled.scaled_codes(codes, scales.astype(jnp.float32), e2m1)
    squares = jax.lax.optimization_barrier(jnp.square(values.reshape(seen.shape) - seen))
    return functools.reduce(jnp.add, (squares[..., i] for i in range(nvfp4.BLOCK)))


def quantize(x: jax.Array, outer: str | jax.Array = "row") -> BlockScaled:
    """x [..., n] rounded to nearest in 4/6. `outer` and errors as in `nvfp4.scales_of`."""
    scales, outer = scales_of(x, outer)
    codes = e2m1.encode(block_scaled.normalise(x, scales, outer))
    return block_scaled.pack(codes, scales, outer, NAME)
