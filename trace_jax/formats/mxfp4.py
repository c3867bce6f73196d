"""MXFP4 and MXFP8: codes and a power-of-two (E8M0) scale for each 32 values; no outer scale.

    "mxfp4"        E2M1; smallest 2^e with amax <= 6 * 2^e: never saturates (Transformer Engine)
    "mxfp4_floor"  E2M1; 2^(floor(log2 amax) - 2): the OCP text; saturates where amax > 6 * 2^e
    "mxfp8"        E4M3; smallest 2^e with amax <= 448 * 2^e: never saturates
The two scale rules differ in a third of MXFP4's codes, so the format's name says which. All are
read off the float32 bits of amax, so they are exact. Source: method.md 3.4 for MXFP4; for MXFP8
"Recipes for Pre-training LLMs with MXFP8" (arXiv 2506.08027), which rounds the scale up too.
"""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.formats import block_scaled
from trace_jax.formats.block_scaled import FORMATS, BlockScaled

BLOCK = 32
dequantize = block_scaled.dequantize
RULES = ("mxfp4", "mxfp4_floor", "mxfp8")
LARGEST_SCALE = 254  # the code of 2^127
# Where the middle of the interval (in powers of two) that a scale stands for lies, times 1 / amax.
MIDDLE = {"mxfp4": 2**0.5 / 6, "mxfp4_floor": 2**-0.5 / 4}


def scales_of(x: jax.Array, rule: str = "mxfp4") -> jax.Array:
    """Block scales float8_e8m0fnu [..., n/32] of x [..., n]; a block with a NaN gets the NaN scale.

    Raises ValueError for an unknown rule or when 32 does not divide n.
    """
    if rule not in RULES:
        raise ValueError(f"MX scale rule {rule!r}: choose one of {RULES}")
    blocks = block_scaled.split_blocks(block_scaled.to_float32(x), BLOCK)
    amax = block_scaled.largest_magnitude(blocks)
    exponent, mantissa = _parts(jax.lax.bitcast_convert_type(amax, jnp.int32))
    # 1.5 * 2^2 of E2M1, 1.75 * 2^8 of E4M3.
    power, most = _parts(int(np.float32(FORMATS[rule].element.MAX).view(np.int32)))
    biased = exponent - (power - 127)
    if rule != "mxfp4_floor":
        biased += mantissa > most  # the largest value would exceed what the element type holds
    biased = jnp.where(jnp.isnan(amax), 255, jnp.clip(biased, 0, 254)).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(biased, jnp.float8_e8m0fnu)


def _parts(bits):
    """(biased exponent, mantissa) of the bits of a float32."""
    return bits >> 23, bits & 0x7FFFFF


def unrounded(x: jax.Array, rule: str) -> jax.Array:
    """Float32 [..., n/32]: above a block's scale whose amax is nearer to the next larger's."""
    blocks = block_scaled.split_blocks(block_scaled.to_float32(x), BLOCK)
    return block_scaled.largest_magnitude(blocks) * MIDDLE[rule]


def quantize(x: jax.Array, rule: str = "mxfp4") -> BlockScaled:
    """x [..., n] rounded to nearest in the format and under the scale rule that are named."""
    scales = scales_of(x, rule)
    codes = FORMATS[rule].element.encode(block_scaled.normalise(x, scales, None))
    return block_scaled.pack(codes, scales, None, rule)
