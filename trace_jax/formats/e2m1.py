"""E2M1, the four-bit float: sign, two exponent bits, one mantissa bit.

A code is `s|ee|m`. Magnitudes by code 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; codes 8..15 are their
negatives. There is no Inf and no NaN, and zero is always code 0 here. Neighbouring magnitudes
differ in their low bit, which is what lets one recorded bit name a code (guidance/quantizer.py).

All arithmetic is float32. Because the grid is a piecewise uniform one (steps 0.5, 1 and 2 below
2, 4 and 6), a code is a rounded multiple of the step, exactly.
Source: OCP MX specification 1.0, section 5.3.3; TRACE section 3 for the neighbours.
"""

import jax
import jax.numpy as jnp
import numpy as np

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BITS = 4
MAX = 6.0
LARGEST = 7  # its code


def _magnitude_code(a: jax.Array, integer) -> jax.Array:
    """Code of magnitude a in [0, 6], where `integer` (rint or floor) decides between neighbours."""
    code = jnp.where(a < 2, integer(2 * a), jnp.where(a < 4, integer(a) + 2, integer(a / 2) + 4))
    return code.astype(jnp.uint8)


def _magnitude(z: jax.Array) -> jax.Array:
    """|z| clipped to the grid's end; NaN becomes 0 (it stays visible in the block scale)."""
    return jnp.where(jnp.isnan(z), 0, jnp.minimum(jnp.abs(z), MAX))


def with_sign(magnitude_code: jax.Array, z: jax.Array) -> jax.Array:
    """Codes uint8 0..15 with the sign of z; a zero magnitude is the code 0, never 8."""
    negative = (z < 0) & (magnitude_code > 0)
    return magnitude_code + (negative.astype(jnp.uint8) << 3)


def encode(z: jax.Array) -> jax.Array:
    """Codes uint8 0..15 nearest to z (float32, any shape): ties to the even code, saturating."""
    return with_sign(_magnitude_code(_magnitude(z), jnp.rint), z)


def bracket(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Magnitude codes uint8 (low, high) of the two neighbours around |z| clipped to 6.

    high is low + 1, or low itself where |z| lies exactly on the grid: the bracket is then
    degenerate and z keeps its value (TRACE section 3.1; self-replay needs this).
    """
    a = _magnitude(z)
    low = _magnitude_code(a, jnp.floor)
    return low, jnp.where(magnitude(low) == a, low, low + 1)


def magnitude(code: jax.Array) -> jax.Array:
    """Absolute value float32 of codes uint8 0..15."""
    m = (code & 7).astype(jnp.float32)
    return jnp.where(m < 4, m / 2, jnp.where(m < 6, m - 2, 2 * m - 8))


def decode(code: jax.Array) -> jax.Array:
    """Values float32 of codes uint8 0..15."""
    return jnp.where(code & 8, -1, 1).astype(jnp.float32) * magnitude(code)


def pack_bits(fields: jax.Array, bits: int) -> jax.Array:
    """Bytes uint8 [..., n*bits/8] of n fields of `bits` (1, 2, 4 or 8), the first in the low end.

    With bits = 4 this is the FP4 layout everyone uses: element 2i in the low nibble of byte i.
    """
    per_byte = 8 // bits
    if fields.shape[-1] % per_byte:
        raise ValueError(
            f"pack_bits: {fields.shape[-1]} fields of {bits} bits do not fill whole bytes; "
            f"make the last axis a multiple of {per_byte}"
        )
    grouped = fields.reshape(*fields.shape[:-1], -1, per_byte)
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    return jnp.sum(grouped << shifts, axis=-1, dtype=jnp.uint8)


def unpack_bits(packed: jax.Array, bits: int) -> jax.Array:
    """Fields uint8 [..., n] of bytes uint8 [..., n*bits/8]; the inverse of `pack_bits`."""
    per_byte = 8 // bits
    # Bytes repeated, and shifts of int32: with an axis of their own for the fields of a byte, XLA
    # of JAX 0.10 leaves a guided step on CPU scalar (10% of it for one bit a value, against 3%).
    spread = jnp.repeat(packed, per_byte, axis=-1).astype(jnp.int32)
    place = jax.lax.broadcasted_iota(jnp.int32, spread.shape, spread.ndim - 1) % per_byte
    return ((spread >> (place * bits)) & (2**bits - 1)).astype(jnp.uint8)
