"""MXFP4 under both scale rules, and MXFP8, against the oracle in every bit, and against peers."""

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.formats import edges, oracle
from tests.formats.edges import EDGE_INDEX, EDGES
from trace_jax.formats import block_scaled, mxfp4
from trace_jax.formats import quantize as formats

RULES = ["mxfp4", "mxfp4_floor", "mxfp8"]
GRID = {rule: oracle.grid_of(rule) for rule in RULES}
quantize = jax.jit(mxfp4.quantize, static_argnames="rule")
dequantize = jax.jit(mxfp4.dequantize)


def check(x, rule):
    q = quantize(x, rule=rule)
    expected = oracle.quantize(x, rule)
    assert (q.fmt, q.scales.dtype, q.outer, q.shape) == (rule, jnp.float8_e8m0fnu, None, x.shape)
    oracle.assert_same(q, expected)
    oracle.assert_same_bits(dequantize(q), expected.values)
    return oracle.read(q)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_random_values_equal_the_oracle(rule, dtype):
    x = edges.draw(16, 2048, spread=2)
    check(edges.to_bfloat16(x) if dtype == "bfloat16" else x, rule)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_edge_cases_equal_the_oracle(rule, dtype):
    check(edges.to_bfloat16(EDGES) if dtype == "bfloat16" else EDGES, rule)


def _blocks_of(amax):
    """One block [n, 32] for each largest magnitude, down to a quarter of it."""
    shape = np.linspace(1, 0.25, 32) * (-1) ** np.arange(32)
    return np.asarray(amax, np.float32)[:, None] * shape.astype(np.float32)


@pytest.mark.parametrize("rule", RULES)
def test_every_reachable_scale(rule):
    # 2^k, the last that fits it, the float above and the last before 2^(k+1), k of normal scales.
    mantissa, below = (1.75, 8) if rule == "mxfp8" else (1.5, 2)
    k = np.arange(-125 + below, 127)
    power = 2.0**k
    fits = (mantissa * power).astype(np.float32)
    amax = [power, fits, np.nextafter(fits, np.inf), power * (2 - 2.0**-23)]
    result = check(_blocks_of(np.concatenate(amax)), rule)
    scales = result.scales.reshape(4, -1)
    biased = k - below + 127
    np.testing.assert_array_equal(scales[:2], [biased, biased])
    np.testing.assert_array_equal(scales[2:], [biased + (rule != "mxfp4_floor")] * 2)


@pytest.mark.parametrize("rule", ["mxfp4", "mxfp8"])
def test_round_up_never_saturates_and_wastes_less_than_one_binade(rule):
    x = _blocks_of(np.exp(np.linspace(-20, 20, 999)))
    q = quantize(x, rule=rule)
    largest = np.abs(x).max(-1) / q.scales.astype(jnp.float32)[:, 0]
    assert largest.max() <= GRID[rule][-1]
    assert largest.min() > GRID[rule][-1] / 2


def test_mxfp8_is_within_a_sixteenth_of_every_value_that_is_not_small():
    """Half a step of three mantissa bits; small is what lies 2^14 below the block's largest."""
    x = _blocks_of(np.exp(np.linspace(-20, 20, 999)))
    assert np.all(np.abs(dequantize(quantize(x, rule="mxfp8")) - x) <= np.abs(x) / 16)
    x = edges.draw(64, 1024, spread=0.5)
    lost = {rule: np.mean((dequantize(quantize(x, rule=rule)) - x) ** 2) for rule in RULES}
    assert lost["mxfp8"] < lost["mxfp4"] / 15


def test_floor_saturates_above_6_times_the_scale():
    result = check(_blocks_of([1.99 * 8, 1.5 * 8, 8]), "mxfp4_floor")
    assert result.scales[:, 0].tolist() == [128] * 3  # 2
    assert result.codes[:, 0].tolist() == [7, 7, 6]
    assert result.values[:, 0].tolist() == [12, 12, 8]


def test_the_two_rules_differ_in_a_third_of_the_codes():
    # 94,083 of 262,144 in method.md 3.4.
    x = edges.draw(256, 1024, spread=0.5)
    up, floor = (oracle.read(quantize(x, rule=rule)).codes for rule in RULES[:2])
    assert 0.3 < np.mean(up != floor) < 0.42


@pytest.mark.parametrize("rule", RULES)
class TestEdgeBlocks:
    """What follows from the E8M0 scale: no zero, one NaN, nothing shared between blocks."""

    def _row(self, name, rule):
        i = EDGE_INDEX[name]
        q = oracle.read(quantize(EDGES, rule=rule))
        return q.codes[i], q.scales[i], np.asarray(dequantize(quantize(EDGES, rule=rule)))[i]

    def test_zeros_have_the_smallest_scale(self, rule):
        codes, scales, values = self._row("zero row", rule)
        assert scales.tolist() == [0, 0]
        assert not codes.any()
        oracle.assert_same_bits(values, np.zeros(edges.WIDTH, np.float32))

    @pytest.mark.parametrize("name", ["NaN", "NaN and Inf"])
    def test_a_nan_is_visible_in_its_block_and_in_no_other(self, rule, name):
        codes, scales, values = self._row(name, rule)
        assert scales[0] == 255
        assert not codes[:32].any()
        assert np.isnan(values[:32]).all()
        assert np.isfinite(values[32:]).all()

    @pytest.mark.parametrize(("name", "negative"), [("+Inf", False), ("-Inf", True)])
    def test_an_infinity_stays_one(self, rule, name, negative):
        codes, scales, values = self._row(name, rule)
        expected = (247, 126 + 128 * negative) if rule == "mxfp8" else (253, 7 + 8 * negative)
        assert (scales[0], codes[5]) == expected
        assert values[5] == EDGES[EDGE_INDEX[name], 5]
        assert np.isfinite(np.delete(values, 5)).all()

    def test_the_largest_float32(self, rule):
        # Rounded up, it is 4 * 2^126, which float32 cannot hold; the floor rule saturates below it.
        *_, values = self._row("largest float32", rule)
        assert values[0] == (6 * 2.0**125 if rule == "mxfp4_floor" else np.inf)

    def test_no_code_is_minus_zero_or_nan(self, rule):
        never = [127, 128, 255] if rule == "mxfp8" else [8]
        assert not np.isin(oracle.read(quantize(EDGES, rule=rule)).codes, never).any()

    def test_float32_subnormals_give_finite_numbers(self, rule):
        x = np.full((1, 64), 1e-38, np.float32) * np.linspace(-1, 1, 64, dtype=np.float32)
        assert np.abs(dequantize(quantize(x, rule=rule))).max() <= 1e-37


def test_zero_bytes_are_zeros_where_jnp_zeros_are_nan():
    """E8M0 has no zero; its byte 0 is 2^-127. Buffers and padding must be made of bytes."""
    q = jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), quantize(EDGES))
    assert q.scales.dtype == jnp.float8_e8m0fnu
    assert not dequantize(q).any()
    assert not block_scaled.operand(q, jnp.bfloat16).values.any()
    assert np.isnan(jnp.zeros(2, jnp.float8_e8m0fnu).astype(jnp.float32)).all()


def test_errors():
    with pytest.raises(ValueError, match=r"is 48, not a multiple of the block 32.*64"):
        mxfp4.quantize(jnp.zeros((2, 48)))
    with pytest.raises(ValueError, match=r"'mxfp4_round'.*'mxfp4', 'mxfp4_floor', 'mxfp8'"):
        mxfp4.quantize(jnp.zeros((2, 32)), "mxfp4_round")


@pytest.mark.parametrize("rule", RULES)
def test_quantize_by_name_is_the_same_function(rule):
    by_name = jax.jit(lambda x: formats.quantize(x, rule))(EDGES)
    oracle.assert_same(by_name, oracle.read(quantize(EDGES, rule=rule)))
    w = edges.draw(6 * 8, 32).reshape(2, 3, 8, 32)
    matrices = jax.jit(formats.quantize_matrices, static_argnums=1)(w, rule)
    oracle.assert_same(matrices, oracle.quantize(w, rule))


def test_gfloat_agrees_with_the_floor_rule():
    x = edges.draw(32, 256, seed=1)
    info = gfloat.formats.format_info_mxfp4_e2m1
    blocks = [
        gfloat.quantize_block(info, block.astype(np.float64), gfloat.compute_scale_amax)
        for block in x.reshape(-1, 32)
    ]
    theirs = np.array(blocks).reshape(x.shape)
    np.testing.assert_array_equal(dequantize(quantize(x, rule="mxfp4_floor")), theirs)


@pytest.mark.parametrize("rule", ["mxfp4", "mxfp8"])
def test_qwix_agrees_with_the_round_up_rule(rule):
    qarray = pytest.importorskip("qwix._src.core.qarray", reason="qwix needs Python 3.12")
    x = edges.draw(256, 1024, seed=2)
    how = qarray.HowToQuantize(qtype=rule, channelwise_axes=(0,), tiled_axes={1: 32})
    theirs = qarray.quantize(jnp.asarray(x), how)
    scales = theirs.scale.astype(jnp.float32)
    q = quantize(x, rule=rule)
    np.testing.assert_array_equal(q.scales.astype(jnp.float32), scales)
    values = theirs.qvalue.astype(jnp.float32).reshape(256, -1, 32) * scales[..., None]
    np.testing.assert_array_equal(dequantize(q), values.reshape(x.shape))
