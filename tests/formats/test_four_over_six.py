"""4/6 against the oracle in every bit, its choice against float64, and what edges were decided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.formats import edges, oracle
from tests.formats.edges import EDGE_INDEX, EDGES, FINITE_EDGES
from trace_jax.formats import four_over_six, nvfp4
from trace_jax.formats import quantize as formats

FMT = four_over_six.NAME
quantize = jax.jit(four_over_six.quantize, static_argnames="outer")
quantize_with = jax.jit(four_over_six.quantize)  # an outer scale that is given
dequantize = jax.jit(nvfp4.dequantize)
ROW_SCALES = np.exp(np.linspace(-9, 3, len(EDGES))).astype(np.float32)  # no powers of two
OUTERS = {"row": "row", "tensor": "tensor", "a row each": ROW_SCALES, "a scalar": np.float32(0.011)}
ONE = np.float32(1)


def check(x, outer):
    q = (quantize if isinstance(outer, str) else quantize_with)(x, outer=outer)
    expected = oracle.quantize(x, FMT, outer)
    assert (q.fmt, q.scales.dtype, q.shape) == (FMT, jnp.float8_e4m3fn, x.shape)
    oracle.assert_same_but_near_ties(q, expected)
    oracle.assert_same_bits(dequantize(q), oracle.read(q).values)
    return oracle.read(q)


def scales_of(q):
    return oracle.decode_scales(q.scales, FMT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("outer", OUTERS.values(), ids=OUTERS)
def test_random_values_equal_the_oracle(outer, dtype):
    x = edges.draw(len(EDGES), 2048)
    check(edges.to_bfloat16(x) if dtype == "bfloat16" else x, outer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("outer", OUTERS.values(), ids=OUTERS)
def test_edge_cases_equal_the_oracle(outer, dtype):
    # One scale for a tensor that holds NaN is NaN; one for the range of float32 flushes to zero.
    x = EDGES
    if outer is not OUTERS["row"]:
        x = FINITE_EDGES[: EDGE_INDEX["largest float32"]]
    if outer is OUTERS["a row each"]:
        outer = outer[: len(x)]
    check(edges.to_bfloat16(x) if dtype == "bfloat16" else x, outer)


# ---- The choice


def test_a_block_by_hand():
    """Under an outer scale of 1 a largest value of 24 has the block scale 4, or 6."""
    x = np.zeros((2, 16), np.float32)
    x[0, :3] = 24, 18, 12  # at 6 they are 4, 3 and 2; at 4 they would be 6, 4.5 and 3
    x[1, :3] = 24, 16, 8  # at 4 they are 6, 4 and 2; at 6 they would be 4, 2.67 and 1.33
    result = check(x, ONE)
    assert scales_of(result)[:, 0].tolist() == [6, 4]
    assert result.codes[:, :3].tolist() == [[6, 5, 4], [7, 6, 4]]
    np.testing.assert_array_equal(result.values, x)
    assert nvfp4.dequantize(nvfp4.quantize(x, ONE))[:, 1].tolist() == [16, 16]


def errors(x, outer):
    """Float64 squared errors [..., n/16] of 6, of 4, and of what was taken, in units of outer."""
    encoding = np.float32(1) / np.asarray(outer, np.float32)
    encoding = encoding.reshape(encoding.shape + (1,) * (x.ndim - encoding.ndim))
    base = np.abs(x).reshape(*x.shape[:-1], -1, 16).max(-1) / np.float32(6) * encoding
    bytes_ = [oracle.nearest(oracle.E4M3, np.minimum(k * base, 448)) for k in (1, np.float32(1.5))]
    bytes_.append(oracle.read(quantize_with(x, outer=outer)).scales)
    return [oracle.four_over_six_error(x, b, encoding, outer, np.float64) for b in bytes_]


def test_the_smaller_error_is_taken():
    x = edges.draw(64, 1024, seed=1, spread=0.5)
    six, four, taken = errors(x, np.float32(np.abs(x).max() / 1536))
    np.testing.assert_allclose(taken, np.minimum(six, four), rtol=1e-5)
    assert 0.2 < np.mean(taken < six) < 0.6
    assert np.mean(taken == six) + np.mean(taken == four) > 0.999


def test_of_equal_errors_6_is_taken():
    # Nothing but zeros and the largest value: either candidate represents it to the bit.
    x = np.zeros((126, 16), np.float32)
    power = oracle.E4M3[8:120]  # scales whose 1.5 fold is E4M3 too
    power = power[np.isin(power * 1.5, oracle.E4M3)]
    x = x[: len(power)]
    x[:, 3] = 6 * power
    assert len(power) > 40
    result = check(x, ONE)
    np.testing.assert_array_equal(scales_of(result)[:, 0], power)
    assert (result.codes[:, 3] == 7).all()


def test_less_is_lost_than_by_nvfp4():
    """By a twentieth to a quarter of the squared error, on Gaussian values and on heavier tails."""
    for spread in (0, 0.5):
        x = edges.draw(256, 1024, seed=2, spread=spread)
        four = np.mean((np.asarray(dequantize(quantize(x))) - x) ** 2)
        six = np.mean((np.asarray(nvfp4.dequantize(nvfp4.quantize(x))) - x) ** 2)
        assert 0.75 < four / six < 0.95


# ---- Scales


def test_the_largest_value_of_a_row_has_a_block_scale_of_256_or_384():
    x = edges.draw(512, 256, spread=0.5)
    scales = scales_of(check(x, "row"))
    largest = np.abs(x).argmax(axis=-1) // 16
    assert set(scales[np.arange(512), largest].tolist()) == {256, 384}
    assert scales.max() == 384


def test_every_block_scale_is_reachable_and_right():
    # Blocks that either candidate fits to the bit, from 4 and from 6 times the scale down.
    fits = {4: [4, 3, 2, 1.5, 1, 0.5], 6: [6, 4, 3, 2, 1.5, 1, 0.5]}
    for values in fits.values():
        shape = np.array([*values, *[0] * (16 - len(values))], np.float32)
        result = check(oracle.E4M3[:, None] * shape, ONE)
        np.testing.assert_array_equal(result.scales[:, 0], np.arange(127))
        np.testing.assert_array_equal(result.values, oracle.E4M3[:, None] * shape)


@pytest.mark.parametrize("outer", [1.0, 0.3])
def test_every_midpoint_of_block_scales_and_its_neighbours(outer):
    middles = (oracle.E4M3[1:].astype(np.float64) + oracle.E4M3[:-1]) / 2 * outer
    middles = np.concatenate([6 * middles, 4 * middles])
    steps = np.arange(-3, 4) * np.spacing(middles.astype(np.float32))[:, None]
    amax = (middles[:, None] + steps).astype(np.float32).reshape(-1, 1)
    check(amax * np.array([1, -0.7, 0.4] + [0.1] * 13, np.float32), np.float32(outer))


def test_a_scale_above_448_is_clamped_before_the_cast():
    # Only under an outer scale that is given: the own one leaves room up to 384.
    x = np.array([6 * 299, 6 * 448, 6 * 465, 1e4, 3e38, np.inf], np.float32)
    x = np.concatenate([x[:, None], np.zeros((6, 15), np.float32)], axis=1)
    result = check(x, ONE)
    assert scales_of(result)[:, 0].tolist() == [448] * 6
    assert result.values[:, 0].tolist() == [4 * 448, 2688, 2688, 2688, 2688, 2688]


# ---- What was decided


def row(name):
    i = EDGE_INDEX[name]
    q = quantize(EDGES)
    read = oracle.read(q)
    return read.codes[i], scales_of(read)[i], read.outer[i], np.asarray(dequantize(q))[i]


def test_a_zero_row_has_the_form_of_padding():
    codes, scales, outer, values = row("zero row")
    assert (outer, scales.tolist()) == (1, [0] * 4)
    assert not codes.any()
    assert not values.any()


@pytest.mark.parametrize(("name", "sign"), [("+Inf", 1), ("-Inf", -1)])
def test_an_infinity_becomes_2688_and_the_row_has_outer_scale_1(name, sign):
    _, scales, outer, values = row(name)
    assert (outer, scales[0], values[5]) == (1, 448, sign * 2688)
    alone = oracle.quantize(EDGES[EDGE_INDEX[name], 16:], FMT, ONE)
    np.testing.assert_array_equal(values[16:], alone.values)


@pytest.mark.parametrize("name", ["NaN", "NaN and Inf"])
def test_a_nan_is_visible_in_its_whole_row(name):
    codes, scales, outer, values = row(name)
    assert np.isnan(outer)
    assert np.isnan(scales).all()
    assert np.isnan(values).all()
    assert not codes.any()


def test_no_code_anywhere_is_8():
    assert not np.any(oracle.read(quantize(EDGES)).codes == 8)


def test_small_rows_choose_as_large_ones_do():
    """The error is taken in units of the outer scale: no square of it underflows."""
    x = edges.draw(16, 256)
    small = x * np.float32(2.0**-90)
    for a, b in zip(oracle.read(quantize(x))[:2], oracle.read(quantize(small))[:2], strict=True):
        np.testing.assert_array_equal(a, b)


def test_quantize_by_name_is_the_same_function():
    oracle.assert_same(
        jax.jit(lambda x: formats.quantize(x, FMT))(EDGES), oracle.read(quantize(EDGES))
    )
    w = edges.draw(6 * 8, 32).reshape(2, 3, 8, 32)
    q = jax.jit(formats.quantize_matrices, static_argnums=1)(w, FMT)
    assert (q.shape, q.outer.shape) == (w.shape, (2, 3))
    for layer in range(2):
        for expert in range(3):
            oracle.assert_same(q[layer, expert], oracle.quantize(w[layer, expert], FMT, "tensor"))


def test_errors():
    with pytest.raises(ValueError, match=r"is 24, not a multiple.*block 16; pad it to 32"):
        four_over_six.quantize(jnp.zeros((2, 24)))
    with pytest.raises(ValueError, match=r"outer='column'.*'row', 'tensor'"):
        four_over_six.quantize(jnp.zeros((2, 16)), outer="column")
