"""E2M1: every code, every midpoint and its neighbours, every bfloat16 number, and packing."""

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.formats import oracle
from trace_jax.formats import e2m1

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
# Midpoint, code below it, code above it, code at it (the even one). Source: method.md 3.1.
MIDPOINTS = [
    (0.25, 0, 1, 0),
    (0.75, 1, 2, 2),
    (1.25, 2, 3, 2),
    (1.75, 3, 4, 4),
    (2.5, 4, 5, 4),
    (3.5, 5, 6, 6),
    (5.0, 6, 7, 6),
]
# Every bfloat16 number but subnormals, which a backend may flush to zero: 65,282 values of float32.
BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
BFLOAT16 = BFLOAT16[(BFLOAT16 == 0) | ~(np.abs(BFLOAT16) < np.finfo(np.float32).tiny)]

encode = jax.jit(e2m1.encode)
bracket = jax.jit(e2m1.bracket)


def _next(value, towards):
    return np.nextafter(np.float32(value), np.float32(towards))


def test_the_sixteen_codes():
    codes = jnp.arange(16, dtype=jnp.uint8)
    np.testing.assert_array_equal(e2m1.decode(codes), VALUES)
    np.testing.assert_array_equal(e2m1.magnitude(codes), np.abs(VALUES))
    assert e2m1.decode(codes).dtype == jnp.float32
    back = e2m1.encode(e2m1.decode(codes))
    assert back.dtype == jnp.uint8
    np.testing.assert_array_equal(back, [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15])
    np.testing.assert_array_equal(e2m1.GRID, VALUES[:8])


@pytest.mark.parametrize("how", [e2m1.encode, encode], ids=["eager", "jit"])
@pytest.mark.parametrize(("midpoint", "below", "above", "at"), MIDPOINTS)
def test_a_midpoint_and_its_neighbours(how, midpoint, below, above, at):
    z = np.array([_next(midpoint, 0), midpoint, _next(midpoint, 9)], np.float32)
    np.testing.assert_array_equal(how(z), [below, at, above])
    sign = np.array([8 * (code > 0) for code in (below, at, above)])
    np.testing.assert_array_equal(how(-z), np.array([below, at, above]) + sign)


def test_what_lies_beside_a_grid_value_rounds_to_it():
    for code, value in enumerate(VALUES[1:8], 1):
        z = np.array([_next(value, 0), value, _next(value, 9)], np.float32)
        np.testing.assert_array_equal(encode(z), [code] * 3)


def test_saturation():
    z = np.array([6, _next(6, 9), 6.4, 7, 8, 1e30, np.finfo(np.float32).max, np.inf], np.float32)
    np.testing.assert_array_equal(encode(z), [7] * 8)
    np.testing.assert_array_equal(encode(-z), [15] * 8)


def test_nan_and_every_zero_are_code_0():
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    zeros = np.array([0.0, -0.0, 0.25, -0.25, 0.1, -0.1, 1e-30, -1e-30], np.float32)
    np.testing.assert_array_equal(encode(nans), [0] * 4)
    np.testing.assert_array_equal(encode(zeros), [0] * 8)
    subnormals = np.array([1e-45, -1e-45, 1e-39, -1e-39], np.float32)  # flushed or not
    np.testing.assert_array_equal(encode(subnormals), [0] * 4)


def test_every_bfloat16_number_against_the_oracle():
    np.testing.assert_array_equal(encode(BFLOAT16), oracle.encode(BFLOAT16))
    np.testing.assert_array_equal(e2m1.encode(BFLOAT16), encode(BFLOAT16))


def test_every_bfloat16_number_against_gfloat_and_the_float4_cast():
    numbers = BFLOAT16[~np.isnan(BFLOAT16)]
    ours = np.asarray(encode(numbers))
    info = gfloat.formats.format_info_ocp_e2m1
    with np.errstate(over="ignore"):
        rounded = gfloat.round_ndarray(info, numbers, gfloat.RoundMode.TiesToEven, True)
    theirs = gfloat.encode_ndarray(info, rounded)
    np.testing.assert_array_equal(ours, np.where(theirs == 8, 0, theirs))  # they keep -0
    cast = np.asarray(jnp.asarray(numbers).astype(jnp.float4_e2m1fn)).astype(np.float32)
    np.testing.assert_array_equal(e2m1.decode(ours), cast)


def test_brackets():
    for low in range(7):
        inside = np.linspace(_next(VALUES[low], 9), _next(VALUES[low + 1], 0), 5, dtype=np.float32)
        if low == 0:
            inside[0] = 1e-30  # beside 0 lie subnormals
        for z in (inside, -inside):
            np.testing.assert_array_equal(bracket(z), [[low] * 5, [low + 1] * 5])


def test_brackets_on_the_grid_are_degenerate_and_beyond_it_saturate():
    grid = np.array(VALUES[:8], np.float32)
    for z in (grid, -grid):
        np.testing.assert_array_equal(bracket(z), [np.arange(8)] * 2)
    beyond = np.array([_next(6, 9), 6.5, 1e30, np.inf, -6.5, -np.inf], np.float32)
    np.testing.assert_array_equal(bracket(beyond), [[7] * 6] * 2)
    np.testing.assert_array_equal(bracket(np.array([np.nan, -np.nan], np.float32)), [[0, 0]] * 2)


def test_every_bfloat16_number_lies_in_its_bracket_which_holds_the_nearest_code():
    numbers = BFLOAT16[~np.isnan(BFLOAT16)]
    a = np.minimum(np.abs(numbers), 6)
    low, high = map(np.asarray, bracket(numbers))
    assert np.all((oracle.GRID[low] <= a) & (a <= oracle.GRID[high]))
    assert np.all(high - low == ~np.isin(a, oracle.GRID))  # 0 or 1: the two low bits differ
    nearest = np.asarray(encode(numbers)) & 7
    assert np.all((nearest == low) | (nearest == high))


@pytest.mark.parametrize(
    ("bits", "fields", "packed"),
    [
        (4, [1, 2, 15, 0, 7, 8], [0x21, 0x0F, 0x87]),  # element 2i in the low nibble of byte i
        (2, [3, 0, 0, 0, 0, 1, 2, 3], [0b00000011, 0b11100100]),
        (1, [1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1], [0b00000001, 0b10000110]),
    ],
)
def test_the_first_field_is_in_the_low_end(bits, fields, packed):
    fields = jnp.array(fields, jnp.uint8)
    result = e2m1.pack_bits(fields, bits)
    assert result.dtype == jnp.uint8
    np.testing.assert_array_equal(result, packed)
    np.testing.assert_array_equal(e2m1.unpack_bits(result, bits), fields)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_every_byte_comes_back(bits):
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, 4, 32)
    fields = jax.jit(e2m1.unpack_bits, static_argnums=1)(packed, bits)
    assert fields.shape == (2, 4, 32 * 8 // bits)
    assert fields.dtype == jnp.uint8
    assert fields.max() == 2**bits - 1
    np.testing.assert_array_equal(e2m1.pack_bits(fields, bits), packed)
    rows = jax.vmap(lambda row: e2m1.pack_bits(row, bits))(fields)
    np.testing.assert_array_equal(rows, packed)


@pytest.mark.parametrize(("bits", "multiple"), [(1, 8), (2, 4), (4, 2)])
def test_fields_that_do_not_fill_bytes_are_an_error(bits, multiple):
    with pytest.raises(ValueError, match=f"7 fields of {bits} bits.*multiple of {multiple}"):
        e2m1.pack_bits(jnp.zeros((2, 7), jnp.uint8), bits)
