"""Properties that hold for every tensor: idempotent, odd, monotone, scale-free, nearest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.formats import oracle
from trace_jax.formats import block_scaled
from trace_jax.formats import quantize as formats

# One shape, so that each format compiles once. Magnitudes keep clear of float32's ends.
SHAPE = (2, 64)
NUMBERS = st.one_of(
    st.floats(-1e4, 1e4, width=32).filter(lambda v: v == 0 or abs(v) > 1e-6),
    st.sampled_from([float(v) for v in oracle.CODE_VALUES]),
)
TENSORS = npst.arrays(np.float32, SHAPE, elements=NUMBERS, fill=st.just(np.float32(0.7)))
FEW = settings(max_examples=25)

every_format = pytest.mark.parametrize("fmt", block_scaled.FORMATS)


def _quantize(x, fmt, outer="row"):
    q = formats.quantize(x, fmt, outer)
    return q, block_scaled.dequantize(q)


_quantize_given = jax.jit(_quantize, static_argnums=1)
_quantize = jax.jit(_quantize, static_argnums=(1, 2))


def _factors(q):
    """Float64 [2, n/b, 1]: the unit of each block."""
    return np.asarray(block_scaled.block_factor(q.scales, q.outer), np.float64)[..., None]


@every_format
@FEW
@given(x=TENSORS)
def test_idempotent(fmt, x):
    q, values = _quantize(x, fmt)
    given = block_scaled.FORMATS[fmt].outer
    again = (_quantize_given(values, fmt, q.outer) if given else _quantize(values, fmt))[1]
    # A subnormal E4M3 scale may leave 6 out of reach, and the next scale is then another one.
    normal = np.asarray(q.scales.astype(jnp.float32)) >= (2.0**-6 if given else 0)
    blocks = np.asarray(values).reshape(*normal.shape, -1)
    np.testing.assert_array_equal(np.asarray(again).reshape(blocks.shape)[normal], blocks[normal])


@every_format
@FEW
@given(x=TENSORS)
def test_odd(fmt, x):
    q, values = _quantize(x, fmt)
    mirrored, negatives = _quantize(-x, fmt)
    np.testing.assert_array_equal(negatives, -values)
    np.testing.assert_array_equal(*(np.asarray(a.scales).view(np.uint8) for a in (q, mirrored)))


@every_format
@FEW
@given(x=TENSORS)
def test_monotone_within_a_block(fmt, x):
    block = block_scaled.FORMATS[fmt].block
    rising = np.sort(x.reshape(2, -1, block), axis=-1).reshape(SHAPE)
    _, values = _quantize(rising, fmt)
    assert np.all(np.diff(np.asarray(values).reshape(2, -1, block), axis=-1) >= 0)


@every_format
@FEW
@given(x=TENSORS, exponent=st.integers(-20, 20))
def test_a_power_of_two_moves_only_the_outermost_scale(fmt, x, exponent):
    power = np.float32(2.0**exponent)
    q, values = _quantize(x, fmt)
    scaled, scaled_values = _quantize(x * power, fmt)
    np.testing.assert_array_equal(scaled.codes, q.codes)
    np.testing.assert_array_equal(scaled_values, values * power)
    before, after = (np.asarray(a.scales).view(np.uint8).astype(int) for a in (q, scaled))
    if block_scaled.FORMATS[fmt].outer:
        np.testing.assert_array_equal(after, before)
        zero = ~x.any(axis=-1)
        np.testing.assert_array_equal(scaled.outer, np.where(zero, 1, q.outer * power))
    else:
        np.testing.assert_array_equal(after[before > 0], before[before > 0] + exponent)


@every_format
@FEW
@given(x=TENSORS)
def test_no_value_of_the_block_lies_nearer(fmt, x):
    q, values = _quantize(x, fmt)
    unit = _factors(q)
    blocks = x.reshape(*unit.shape[:2], -1).astype(np.float64)
    error = np.abs(np.asarray(values).reshape(blocks.shape) - blocks)
    grid = oracle.grid_of(fmt)
    distances = np.abs(blocks[..., None] - unit[..., None] * np.concatenate([grid, -grid]))
    assert np.all(error <= distances.min(-1) + 1e-6 * (np.abs(blocks) + unit))
    # Half a step of the grid, where the grid reaches.
    z = np.abs(blocks) / np.where(unit > 0, unit, np.inf)
    low = np.clip(np.searchsorted(grid, z, side="right") - 1, 0, len(grid) - 2)
    reached = (z <= grid[-1]) & (unit > 0)
    half_step = (grid[low + 1] - grid[low]) / 2
    assert np.all((error <= half_step * unit * (1 + 1e-6))[reached])
    if fmt in ("mxfp4", "mxfp8"):
        assert np.all(z <= grid[-1])
