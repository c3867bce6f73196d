"""E4M3: every code, every midpoint and its neighbours, every bfloat16 number, brackets, peers."""

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.formats import oracle
from tests.formats.test_e2m1 import BFLOAT16
from trace_jax.formats import e2m1, e4m3

GRID = oracle.E4M3
CODES = np.arange(127, dtype=np.uint8)
encode = jax.jit(e4m3.encode)
bracket = jax.jit(e4m3.bracket)


def test_every_code():
    both = jnp.concatenate([jnp.arange(127), jnp.arange(128, 255)]).astype(jnp.uint8)
    values = np.asarray(both).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(e4m3.decode(both), values)
    np.testing.assert_array_equal(e4m3.magnitude(both), np.abs(values))
    assert e4m3.decode(both).dtype == jnp.float32
    back = encode(e4m3.decode(both))
    assert back.dtype == jnp.uint8
    np.testing.assert_array_equal(back, np.where(both == 128, 0, both))
    np.testing.assert_array_equal(np.asarray(e4m3.decode(both))[:127], GRID)
    assert (e4m3.MAX, e4m3.LARGEST, e4m3.BITS) == (GRID[-1], 126, 8)
    assert (e2m1.MAX, e2m1.LARGEST, e2m1.BITS) == (oracle.GRID[-1], 7, 4)


@pytest.mark.parametrize("how", [e4m3.encode, encode], ids=["eager", "jit"])
def test_every_midpoint_and_its_neighbours(how):
    middles = (GRID[1:] + GRID[:-1]) / 2
    below, above = np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(999))
    even = CODES[:-1] + CODES[:-1] % 2
    for sign in (1, -1):
        for z, expected in ((below, CODES[:-1]), (middles, even), (above, CODES[1:])):
            signed = expected + 128 * ((expected > 0) & (sign < 0))
            np.testing.assert_array_equal(how(sign * z), signed)


def test_what_lies_beside_a_grid_value_rounds_to_it():
    for towards in (0, 999):
        z = np.nextafter(GRID[1:], np.float32(towards))
        np.testing.assert_array_equal(encode(z), CODES[1:])


def test_saturation():
    """Where the cast of JAX has NaN, above 464."""
    z = np.array([448, 449, 463, 464, 465, 1e30, np.finfo(np.float32).max, np.inf], np.float32)
    np.testing.assert_array_equal(encode(z), [126] * 8)
    np.testing.assert_array_equal(encode(-z), [254] * 8)


def test_nan_and_every_zero_are_code_0():
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    zeros = np.array([0.0, -0.0, 2.0**-10, -(2.0**-10), 1e-30, -1e-30], np.float32)
    np.testing.assert_array_equal(encode(nans), [0] * 4)
    np.testing.assert_array_equal(encode(zeros), [0] * 6)
    subnormals = np.array([1e-45, -1e-45, 1e-39, -1e-39], np.float32)  # flushed or not
    np.testing.assert_array_equal(encode(subnormals), [0] * 4)


def test_every_bfloat16_number_against_the_oracle():
    np.testing.assert_array_equal(encode(BFLOAT16), oracle.encode(BFLOAT16, GRID))
    np.testing.assert_array_equal(e4m3.encode(BFLOAT16), encode(BFLOAT16))


def test_every_bfloat16_number_against_gfloat_and_the_float8_cast():
    numbers = BFLOAT16[~np.isnan(BFLOAT16)]
    ours = np.asarray(encode(numbers))
    info = gfloat.formats.format_info_ocp_e4m3
    with np.errstate(over="ignore"):
        rounded = gfloat.round_ndarray(info, numbers, gfloat.RoundMode.TiesToEven, True)
    theirs = gfloat.encode_ndarray(info, rounded)
    np.testing.assert_array_equal(ours, np.where(theirs == 128, 0, theirs))  # they keep -0
    cast = np.clip(numbers, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(e4m3.decode(ours), cast)


def test_brackets():
    for low in range(126):
        ends = np.nextafter(GRID[[low, low + 1]], GRID[[low + 1, low]])
        if low == 0:
            ends[0] = 1e-30  # beside 0 lie subnormals
        inside = np.linspace(*ends, 5, dtype=np.float32)
        for z in (inside, -inside):
            np.testing.assert_array_equal(bracket(z), [[low] * 5, [low + 1] * 5])


def test_brackets_on_the_grid_are_degenerate_and_beyond_it_saturate():
    for z in (GRID, -GRID):
        np.testing.assert_array_equal(bracket(z), [CODES] * 2)
    beyond = np.array([449, 465, 1e30, np.inf, -465, -np.inf], np.float32)
    np.testing.assert_array_equal(bracket(beyond), [[126] * 6] * 2)
    np.testing.assert_array_equal(bracket(np.array([np.nan, -np.nan], np.float32)), [[0, 0]] * 2)


def test_every_bfloat16_number_lies_in_its_bracket_which_holds_the_nearest_code():
    numbers = BFLOAT16[~np.isnan(BFLOAT16)]
    a = np.minimum(np.abs(numbers), 448)
    low, high = map(np.asarray, bracket(numbers))
    assert np.all((GRID[low] <= a) & (a <= GRID[high]))
    assert np.all(high - low == ~np.isin(a, GRID))  # 0 or 1: the two low bits differ
    nearest = np.asarray(encode(numbers)) & 127
    assert np.all((nearest == low) | (nearest == high))
