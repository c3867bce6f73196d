"""E4M3, the eight-bit float: sign, four exponent bits, three mantissa bits.

A code is `s|eeee|mmm`. Magnitudes by code 0..126 are the multiples of 2^-9 up to 2^-6 (code 8), and
from there eight to a power of two, up to 448; codes 128..254 are their negatives. There is no Inf;
codes 127 and 255 are NaN and are not written, and zero is always code 0 here. Neighbouring
magnitudes differ in their low bit, as in E2M1, whose functions have the same names.

All arithmetic is float32: a code is a rounded multiple of its step, a power of two, exactly.
Source: OCP 8-bit floating point specification 1.0; OCP MX specification 1.0, section 5.3.1.
"""

import jax
import jax.numpy as jnp

BITS = 8
MAX = 448.0
LARGEST = 126  # its code


def _magnitude_code(a: jax.Array, integer) -> jax.Array:
    """Code of magnitude a in [0, 448], where `integer` (rint or floor) decides of neighbours."""
    bits = jax.lax.bitcast_convert_type(a, jnp.int32)
    exponent = jnp.maximum((bits >> 23) - 127, -6)
    per_step = jax.lax.bitcast_convert_type((127 + 3 - exponent) << 23, jnp.float32)
    return (integer(a * per_step).astype(jnp.int32) + 8 * (exponent + 6)).astype(jnp.uint8)


def _magnitude(z: jax.Array) -> jax.Array:
    """|z| clipped to the grid's end; NaN becomes 0 (it stays visible in the block scale)."""
    return jnp.where(jnp.isnan(z), 0, jnp.minimum(jnp.abs(z), MAX))


def with_sign(magnitude_code: jax.Array, z: jax.Array) -> jax.Array:
    """Codes uint8 0..254 with the sign of z; a zero magnitude is the code 0, never 128."""
    negative = (z < 0) & (magnitude_code > 0)
    return magnitude_code + (negative.astype(jnp.uint8) << 7)


def encode(z: jax.Array) -> jax.Array:
    """Codes uint8 0..254 nearest to z (float32, any shape): ties to the even code, saturating."""
    return with_sign(_magnitude_code(_magnitude(z), jnp.rint), z)


def bracket(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Magnitude codes uint8 (low, high) of the two neighbours around |z| clipped to 448.

    high is low + 1, or low itself where |z| lies exactly on the grid, as in E2M1.
    """
    a = _magnitude(z)
    low = _magnitude_code(a, jnp.floor)
    return low, jnp.where(magnitude(low) == a, low, low + 1)


def magnitude(code: jax.Array) -> jax.Array:
    """Absolute value float32 of codes uint8 0..254 but 127."""
    m = (code & 127).astype(jnp.int32)
    normal = jax.lax.bitcast_convert_type((m << 20) + ((127 - 7) << 23), jnp.float32)
    return jnp.where(m < 8, m.astype(jnp.float32) / 512, normal)


def decode(code: jax.Array) -> jax.Array:
    """Values float32 of codes uint8 0..254 but 127."""
    return jnp.where(code & 128, -1, 1).astype(jnp.float32) * magnitude(code)
