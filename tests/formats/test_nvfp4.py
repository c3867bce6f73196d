"""NVFP4 against the oracle in every bit, what was decided for edge cases, and against peers."""

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.formats import edges, oracle
from tests.formats.edges import EDGE_INDEX, EDGES, FINITE_EDGES
from trace_jax.formats import block_scaled, e2m1, nvfp4
from trace_jax.formats import quantize as formats

quantize = jax.jit(nvfp4.quantize, static_argnames="outer")
quantize_with = jax.jit(nvfp4.quantize)  # an outer scale that is given
dequantize = jax.jit(nvfp4.dequantize)
ROW_SCALES = np.exp(np.linspace(-9, 3, len(EDGES))).astype(np.float32)  # no powers of two
OUTERS = {"row": "row", "tensor": "tensor", "a row each": ROW_SCALES, "a scalar": np.float32(0.011)}


def check(x, outer):
    q = (quantize if isinstance(outer, str) else quantize_with)(x, outer=outer)
    expected = oracle.quantize(x, "nvfp4", outer)
    assert (q.fmt, q.scales.dtype, q.shape) == ("nvfp4", jnp.float8_e4m3fn, x.shape)
    oracle.assert_same(q, expected)
    oracle.assert_same_bits(dequantize(q), expected.values)
    return oracle.read(q)


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


@pytest.fixture(scope="module")
def decided():
    """What became of an edge row by name: (codes, block scales, outer scale, values)."""
    q = oracle.read(quantize(EDGES))
    values = np.asarray(dequantize(quantize(EDGES)))

    def row(name):
        i = EDGE_INDEX[name]
        return q.codes[i], oracle.decode_scales(q.scales[i], "nvfp4"), q.outer[i], values[i]

    return row


class TestDecidedCases:
    """Source: method.md 3.3. Blocks: 0 has values 0..15 of a row, 1 the next 16, and so on."""

    def test_a_zero_block_is_zero(self, decided):
        codes, scales, _, values = decided("zero block")
        assert scales[1] == 0
        assert not codes[16:32].any()
        assert not values[16:32].any()
        assert values[:16].any()

    def test_a_zero_row_has_the_form_of_padding(self, decided):
        codes, scales, outer, values = decided("zero row")
        assert (outer, scales.tolist()) == (1, [0] * 4)
        assert not codes.any()
        assert not values.any()

    def test_a_scale_that_underflows_gives_plus_zero(self, decided):
        codes, scales, outer, values = decided("scale underflows")
        assert (outer, scales[1]) == (1, 0)
        assert set(codes[16:32]) == {7, 15}  # counted as underflow by whoever looks at the codes
        oracle.assert_same_bits(values[16:32], np.zeros(16, np.float32))

    def test_the_smallest_and_the_subnormal_scales_survive(self, decided):
        _, scales, _, values = decided("scale just survives")
        assert scales[1] == 2.0**-9
        assert values[16] == 3 * 2.0**-9
        codes, scales, _, values = decided("scale is E4M3-subnormal")
        assert scales[1] == 3 * 2.0**-9
        assert (codes[16], values[16]) == (7, 18 * 2.0**-9)

    def test_a_scale_that_rounds_down_saturates_at_6(self, decided):
        codes, scales, _, values = decided("scale rounds down")  # z is 6.37
        assert (scales[1], codes[16], values[16]) == (1, 7, 6)
        codes, scales, _, values = decided("scale rounds up")
        assert (scales[1], codes[16], values[16]) == (1.125, 7, 6.75)

    @pytest.mark.parametrize(("name", "sign"), [("+Inf", 1), ("-Inf", -1)])
    def test_an_infinity_becomes_2688_and_the_row_has_outer_scale_1(self, decided, name, sign):
        codes, scales, outer, values = decided(name)
        assert (outer, scales[0], values[5]) == (1, 448, 2688 * sign)
        assert codes[5] == 7 + 8 * (sign < 0)
        assert np.isfinite(values).all()
        alone = oracle.quantize(EDGES[EDGE_INDEX[name], 16:], "nvfp4", np.float32(1))
        np.testing.assert_array_equal(values[16:], alone.values)

    @pytest.mark.parametrize("name", ["NaN", "NaN and Inf"])
    def test_a_nan_is_visible_in_its_whole_row_and_in_no_other(self, decided, name):
        codes, scales, outer, values = decided(name)
        assert np.isnan(outer)
        assert np.isnan(scales).all()
        assert np.isnan(values).all()
        assert not codes.any()
        others = [i for row, i in EDGE_INDEX.items() if not row.startswith("NaN")]
        assert np.isfinite(dequantize(quantize(EDGES))[jnp.array(others)]).all()

    def test_zeros_are_code_0_whatever_their_sign(self, decided):
        codes, _, _, values = decided("signed zeros")
        assert not codes[:16].any()
        oracle.assert_same_bits(values[:16], np.zeros(16, np.float32))

    def test_no_code_anywhere_is_8(self):
        assert not np.any(oracle.read(quantize(EDGES)).codes == 8)

    def test_a_single_value_comes_back(self, decided):
        _, scales, _, values = decided("one value")
        assert scales.tolist() == [0, 448, 0, 0]
        np.testing.assert_allclose(values[20], -3.7, rtol=1e-6)

    def test_values_at_the_ends_of_float32(self, decided):
        for name in ("largest float32", "small but normal"):
            *_, values = decided(name)
            row = EDGES[EDGE_INDEX[name]]
            assert np.isfinite(values).all()
            assert np.abs(values - row).max() <= np.abs(row).max() / 6

    def test_float32_subnormals_give_finite_numbers(self):
        x = np.full((1, 64), 1e-38, np.float32) * np.linspace(-1, 1, 64, dtype=np.float32)
        q = quantize(x)
        assert np.isfinite(q.scales.astype(jnp.float32)).all()
        assert np.isfinite(q.outer).all()
        assert np.abs(dequantize(q)).max() <= 1e-37


def test_a_scale_above_448_is_clamped_before_the_cast():
    # E4M3 has no infinity: 464 rounds to 448, and what lies above would turn into NaN.
    x = np.array([6 * 448, 6 * 464, 6 * 465, 1e4, 3e38, np.inf], np.float32)
    x = np.concatenate([x[:, None], np.zeros((6, 15), np.float32)], axis=1)
    q = quantize_with(x, outer=np.float32(1))
    assert q.scales.astype(jnp.float32).tolist() == [[448]] * 6
    assert dequantize(q)[:, 0].tolist() == [2688] * 6


def test_every_block_scale_is_reachable_and_right():
    # Blocks under an outer scale of 1, whose largest value is 6 * scale, for all 127 scales >= 0.
    shape = np.linspace(-1, 1, 16, dtype=np.float32)
    x = 6 * oracle.E4M3[:, None] * shape
    result = check(x, np.float32(1))
    np.testing.assert_array_equal(result.scales[:, 0], np.arange(127))
    # And in a row, behind a block that sets the outer scale to 1.
    first = np.zeros((127, 16), np.float32)
    first[:, 0] = 2688
    result = check(np.concatenate([first, x], axis=1), "row")
    assert np.all(result.outer == 1)
    np.testing.assert_array_equal(result.scales, [[126, byte] for byte in range(127)])


@pytest.mark.parametrize("outer", [1.0, 0.3])
def test_every_midpoint_of_block_scales_and_its_neighbours(outer):
    middles = (oracle.E4M3[1:].astype(np.float64) + oracle.E4M3[:-1]) / 2 * 6 * outer
    steps = np.arange(-3, 4) * np.spacing(middles.astype(np.float32))[:, None]
    amax = (middles[:, None] + steps).astype(np.float32).reshape(-1, 1)
    x = amax * np.array([1, -0.7, 0.4] + [0.1] * 13, np.float32)
    result = check(x, np.float32(outer))
    assert len(np.unique(result.scales)) == 127


def test_every_code_at_every_scale():
    x = (oracle.CODE_VALUES * oracle.E4M3[:, None]).astype(np.float32)
    result = check(x, np.float32(1))
    np.testing.assert_array_equal(result.codes[1:], [[*range(8), 0, *range(9, 16)]] * 126)
    np.testing.assert_array_equal(result.values, x)


def test_exact_ties_fall_as_the_order_of_operations_says():
    """At a midpoint x = tie * scale * outer the reciprocal, taken first, may tip the scale."""
    middles = (oracle.GRID[1:] + oracle.GRID[:-1]) / 2
    tipped = 0
    for outer in np.float32([0.328125, 0.7109375, 0.005340576171875]):  # short, so x is exact
        factor = oracle.E4M3[1:, None] * outer
        x = factor * np.concatenate([middles, [6], -middles, [0]]).astype(np.float32)
        codes = check(x, outer).codes
        tipped += np.sum(codes != oracle.encode(x / factor))  # dividing rounds every tie to even
    assert tipped > 100


def test_a_matrix_under_one_outer_scale_and_a_stack_of_them():
    w = edges.draw(6 * 8, 32).reshape(2, 3, 8, 32)
    q = jax.jit(formats.quantize_matrices, static_argnums=1)(w, "nvfp4")
    assert (q.shape, q.outer.shape) == (w.shape, (2, 3))
    for layer in range(2):
        for expert in range(3):
            oracle.assert_same(
                q[layer, expert], oracle.quantize(w[layer, expert], "nvfp4", "tensor")
            )


def test_a_vector_is_one_row():
    x = edges.draw(1, 48)[0]
    result = check(x, "row")
    assert result.outer.shape == ()
    oracle.assert_same(quantize(x, outer="tensor"), oracle.quantize(x, "nvfp4", "row"))


def test_a_given_outer_scale_is_kept_and_is_a_prefix_of_the_leading_axes():
    x = edges.draw(4 * 6, 32).reshape(4, 6, 32)
    for outer in (np.float32(0.07), ROW_SCALES[:4], np.outer(ROW_SCALES[:4], ROW_SCALES[4:10])):
        assert check(x, outer).outer.shape == np.shape(outer)


@pytest.mark.parametrize("width", [8, 24, 40])
def test_a_width_that_the_block_does_not_divide_is_an_error(width):
    message = rf"is {width}, not a multiple.*block 16; pad it to {-(-width // 16) * 16}"
    with pytest.raises(ValueError, match=message):
        nvfp4.quantize(jnp.zeros((2, width)))


def test_another_outer_or_format_is_an_error():
    with pytest.raises(ValueError, match=r"outer='column'.*'row', 'tensor'"):
        nvfp4.quantize(jnp.zeros((2, 16)), outer="column")
    with pytest.raises(ValueError, match=r"'nvfp5'.*mxfp4.*mxfp4_floor.*nvfp4"):
        formats.quantize(jnp.zeros((2, 16)), "nvfp5")


def test_quantize_by_name_is_the_same_function():
    x = EDGES
    oracle.assert_same(jax.jit(lambda x: formats.quantize(x, "nvfp4"))(x), oracle.read(quantize(x)))


def _gfloat_nvfp4(x, outer):
    """Codes and block scales of gfloat's roundings, scaled in Transformer Engine's order."""
    nearest = gfloat.RoundMode.TiesToEven
    blocks = x.reshape(len(x), -1, 16)
    amax = np.abs(x).max(axis=-1 if outer == "row" else None, keepdims=True)
    encoding = np.float32(2688) / amax
    raw = np.abs(blocks).max(-1) * (encoding * (np.float32(1) / np.float32(6)))
    e4m3 = gfloat.formats.format_info_ocp_e4m3
    scales = gfloat.round_ndarray(e4m3, np.minimum(raw, np.float32(448)), nearest)
    factor = np.float32(1) / (scales.astype(np.float32) * (np.float32(1) / encoding))
    e2m1 = gfloat.formats.format_info_ocp_e2m1
    rounded = gfloat.round_ndarray(e2m1, blocks * factor[..., None], nearest, True)
    codes = gfloat.encode_ndarray(e2m1, rounded).reshape(x.shape)
    return np.where(codes == 8, 0, codes), gfloat.encode_ndarray(e4m3, scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("outer", ["row", "tensor"])
def test_gfloat_agrees_in_every_code_and_scale(outer, dtype):
    x = edges.draw(64, 1024, seed=1, spread=0.5)
    x = edges.to_bfloat16(x) if dtype == "bfloat16" else x
    q = oracle.read(quantize(x, outer=outer))
    codes, scales = _gfloat_nvfp4(x.astype(np.float32), outer)
    np.testing.assert_array_equal(q.scales, scales)
    np.testing.assert_array_equal(q.codes, codes)


def test_qwix_agrees_where_its_order_of_division_cannot_matter():
    # Under an outer scale that is a power of two, on full-precision data. Source: data.md 6.2.
    qarray = pytest.importorskip("qwix._src.core.qarray", reason="qwix needs Python 3.12")
    x = edges.draw(256, 1024, seed=2, spread=0.5)
    outer = np.float32(2.0 ** np.ceil(np.log2(np.abs(x).max() / 2688)))
    how = qarray.HowToQuantize(qtype="nvfp4", channelwise_axes=(0,), tiled_axes={1: 16})
    theirs = qarray.quantize(jnp.asarray(x / outer), how)
    q = quantize_with(x, outer=outer)
    np.testing.assert_array_equal(q.scales.astype(jnp.float32), theirs.scale.astype(jnp.float32))
    values = theirs.qvalue.astype(jnp.float32).reshape(x.shape)
    np.testing.assert_array_equal(e2m1.decode(block_scaled.unpack(q)), values)
