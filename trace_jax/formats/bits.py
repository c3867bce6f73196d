"""Narrow floats held as unsigned integers, for buffers that are written a row at a time.

XLA on CPU has no scatter of float8 (before JAX 0.12, of bfloat16): it widens the whole buffer,
writes the row and narrows it back, once a token. Integers are written in place. And zero bits are a
harmless scale in every format, whereas jnp.zeros of E8M0, which has no zero, is NaN.
"""

import jax
import jax.numpy as jnp

INTEGER = {1: jnp.uint8, 2: jnp.uint16}  # by bytes an element; wider floats stay as they are


def dtype_of(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which a buffer holds values of `dtype`."""
    return jnp.dtype(INTEGER.get(jnp.dtype(dtype).itemsize, dtype))


def hold(x: jax.Array) -> jax.Array:
    """x in the dtype of a buffer, the same bits."""
    held = dtype_of(x.dtype)
    return x if x.dtype == held else jax.lax.bitcast_convert_type(x, held)


def restore(held: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The values of `dtype` whose bits a buffer holds."""
    return held if held.dtype == dtype else jax.lax.bitcast_convert_type(held, dtype)
