"""MXFP4: E2M1 codes and a power-of-two (E8M0) scale for each 32 values; no outer scale.

Two scale rules are in use and differ in a third of the codes, so the format's name says which:
    "mxfp4"        smallest 2^e with amax <= 6 * 2^e: never saturates (Transformer Engine)
    "mxfp4_floor"  2^(floor(log2 amax) - 2): the OCP text; saturates where amax > 6 * 2^e
Both are read off the float32 bits of amax, so they are exact. Source: method.md 3.4.
"""

import jax
import jax.numpy as jnp

from trace_jax.formats import block_scaled, e2m1
from trace_jax.formats.block_scaled import BlockScaled

BLOCK = 32
dequantize = block_scaled.dequantize
RULES = ("mxfp4", "mxfp4_floor")
LARGEST_SCALE = 254  # the code of 2^127
# Where the middle of the interval (in powers of two) that a scale stands for lies, times 1 / amax.
MIDDLE = {"mxfp4": 2**0.5 / 6, "mxfp4_floor": 2**-0.5 / 4}


def scales_of(x: jax.Array, rule: str = "mxfp4") -> jax.Array:
    """Block scales float8_e8m0fnu [..., n/32] of x [..., n]; a block with a NaN gets the NaN scale.

    Raises ValueError for an unknown rule or when 32 does not divide n.
    """
    if rule not in RULES:
        raise ValueError(f"MXFP4 scale rule {rule!r}: choose one of {RULES}")
    blocks = block_scaled.split_blocks(block_scaled.to_float32(x), BLOCK)
    amax = block_scaled.largest_magnitude(blocks)
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    biased = exponent - 2
    if rule == "mxfp4":
        biased += mantissa > 0x400000  # above 1.5 * 2^k the largest value would exceed 6 * scale
    biased = jnp.where(jnp.isnan(amax), 255, jnp.clip(biased, 0, 254)).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(biased, jnp.float8_e8m0fnu)


def unrounded(x: jax.Array, rule: str) -> jax.Array:
    """Float32 [..., n/32]: above a block's scale whose amax is nearer to the next larger's."""
    blocks = block_scaled.split_blocks(block_scaled.to_float32(x), BLOCK)
    return block_scaled.largest_magnitude(blocks) * MIDDLE[rule]


def quantize(x: jax.Array, rule: str = "mxfp4") -> BlockScaled:
    """x [..., n] rounded to nearest in MXFP4 under the named scale rule."""
    scales = scales_of(x, rule)
    codes = e2m1.encode(block_scaled.normalise(x, scales, None))
    return block_scaled.pack(codes, scales, None, rule)
