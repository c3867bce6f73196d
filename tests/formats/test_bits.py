"""Buffers of integers hold narrow floats bit for bit, and their zeros decode to zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.formats import bits, block_scaled

HELD = {
    "uint8": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e8m0fnu": "uint8",
    "bfloat16": "uint16",
    "float32": "float32",
}


@pytest.mark.parametrize(("dtype", "held"), HELD.items())
def test_every_bit_comes_back(dtype, held):
    dtype = jnp.dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 256, 4096, np.uint8).view(dtype).reshape(4, -1)
    there_and_back = jax.jit(lambda x: bits.restore(bits.hold(x), dtype))
    buffer, back = jax.jit(bits.hold)(raw), there_and_back(raw)
    assert (buffer.dtype, buffer.shape) == (bits.dtype_of(dtype), raw.shape)
    assert buffer.dtype == held
    assert back.dtype == dtype
    for result in (buffer, back):
        np.testing.assert_array_equal(np.asarray(result).view(np.uint8), raw.view(np.uint8))


@pytest.mark.parametrize("fmt", block_scaled.FORMATS)
def test_zeros_of_a_buffer_decode_to_zeros(fmt):
    block, dtype, outer, _ = block_scaled.FORMATS[fmt]
    scales = bits.restore(jnp.zeros((2, 2), bits.dtype_of(dtype)), dtype)
    codes = jnp.zeros((2, 2 * block), jnp.uint8)
    q = block_scaled.pack(codes, scales, jnp.zeros(2, jnp.float32) if outer else None, fmt)
    assert not block_scaled.dequantize(q).any()
    assert not block_scaled.operand(q, jnp.bfloat16).values.any()
