"""The guided quantizer: the paper's table and guarantee, self-replay, gradients, bytes, paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.formats import edges, oracle
from trace_jax.formats import block_scaled, e2m1
from trace_jax.formats import quantize as formats
from trace_jax.guidance import encoding as encodings
from trace_jax.guidance import quantizer
from trace_jax.guidance.encoding import Guide

FORMATS = ["nvfp4", "nvfp4_4over6", "mxfp4", "mxfp8"]
SHAPE = (16, 256)  # of most tensors here, so that few programs are compiled
ENCODINGS = ["codes", "low1", "low2"]
every_format = pytest.mark.parametrize("fmt", FORMATS)
every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)

quantize = jax.jit(formats.quantize, static_argnums=(1, 2))
dequantize = jax.jit(block_scaled.dequantize)
guide_of = jax.jit(quantizer.encode, static_argnums=1)
round_guided = jax.jit(quantizer.round_guided)


def unit_guide(recorded, encoding):
    """Guide of recorded codes [..., 16 n] under scales of exactly 1: x is its own z."""
    codes = jnp.asarray(recorded, jnp.uint8)
    scales = jnp.ones((*codes.shape[:-1], codes.shape[-1] // 16), jnp.float8_e4m3fn)
    return quantizer.encode(block_scaled.pack(codes, scales, jnp.float32(1), "nvfp4"), encoding)


def guided_values(z, recorded, encoding):
    """What z [16] becomes under recorded codes [16], and where it is out of its bracket."""
    q, outside = round_guided(np.asarray(z, np.float32), unit_guide(recorded, encoding))
    return np.asarray(dequantize(q)), np.asarray(outside)


def unpacked(q):
    return np.asarray(block_scaled.unpack(q))


# ---- What each encoding picks


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bit", [0, 1])
@pytest.mark.parametrize(("low", "high"), oracle.LOW1)
def test_table_of_the_low_bit(low, high, bit, sign):
    """Method.md 1.6, every row and column, at 16 points from end to end of the bracket."""
    ends = np.nextafter(oracle.GRID[[low, high]], oracle.GRID[[high, low]])
    if low == 0:
        ends[0] = 1e-30
    z = sign * np.linspace(*ends, 16, dtype=np.float32)
    for recorded in range(bit, 16, 2):  # every code that has this low bit
        values, outside = guided_values(z, [recorded] * 16, "low1")
        np.testing.assert_array_equal(values, [sign * oracle.LOW1[low, high][bit]] * 16)
        assert not outside.any()


POINTS = np.concatenate(  # on the grid, beside it, at midpoints, beside them, within, beyond
    [
        oracle.GRID,
        np.nextafter(oracle.GRID[1:], np.float32(9)),
        np.nextafter(oracle.GRID[1:], np.float32(0)),
        (oracle.GRID[1:] + oracle.GRID[:-1]) / 2,
        np.nextafter((oracle.GRID[1:] + oracle.GRID[:-1]) / 2, np.float32(9)),
        np.nextafter((oracle.GRID[1:] + oracle.GRID[:-1]) / 2, np.float32(0)),
        np.float32([0.01, 0.1, 0.7, 1.1, 1.6, 2.1, 2.9, 3.1, 4.1, 4.2, 5.9]),
        np.float32([6.4, 7, 100, 1e30, np.inf]),
        np.float32([0.3, 0.45, 1.3, 2.3, 3.3, 3.7, 4.5, 5.3, 3.75]),
    ]
)
POINTS = np.stack([POINTS, -POINTS]).reshape(1, -1)[:, : len(POINTS) * 2 // 16 * 16]


@every_encoding
def test_every_recorded_code_in_every_bracket_equals_the_oracle(encoding):
    z = np.repeat(POINTS, 16, axis=0)
    recorded = np.broadcast_to(np.arange(16, dtype=np.uint8)[:, None], z.shape)
    q, outside = round_guided(z, unit_guide(recorded, encoding))
    kept = recorded & {"codes": 15, "low2": 3, "low1": 1}[encoding]
    expected = oracle.guided_codes(z, kept, encoding)
    np.testing.assert_array_equal(unpacked(q), expected)
    between = ~np.isin(np.minimum(np.abs(z), 6), oracle.GRID)
    mask = {"codes": 15, "low2": 3, "low1": 1}[encoding]
    np.testing.assert_array_equal(outside, between & (expected & mask != kept))


@every_encoding
def test_every_recorded_code_in_every_e4m3_bracket_equals_the_oracle(encoding):
    """At a quarter of each bracket, at its middle, and at its ends."""
    low, high = oracle.E4M3[:-1, None], oracle.E4M3[1:, None]
    z = (low + (high - low) * np.array([0, 0.25, 0.5], np.float32)).reshape(-1)
    z = np.resize(np.concatenate([z, -z, [448, -448, 500]]), 768).astype(np.float32)[None]
    mask = {"codes": 255, "low2": 3, "low1": 1}[encoding]
    kept = np.setdiff1d(np.arange(mask + 1, dtype=np.uint8), [127, 128, 255])
    kept = np.repeat(kept[:, None], 768, axis=1)
    scales = np.full((len(kept), 768 // 32), 127, np.uint8)
    scales = jax.lax.bitcast_convert_type(jnp.asarray(scales), jnp.float8_e8m0fnu)  # 1
    guide = quantizer.encode(block_scaled.pack(jnp.asarray(kept), scales, None, "mxfp8"), encoding)
    z = np.broadcast_to(z, kept.shape)
    q, outside = round_guided(z, guide)
    expected = oracle.guided_codes(z, kept, encoding, oracle.E4M3)
    np.testing.assert_array_equal(unpacked(q), expected)
    between = ~np.isin(np.minimum(np.abs(z), 448), oracle.E4M3)
    np.testing.assert_array_equal(outside, between & (expected & mask != kept))


@pytest.mark.parametrize(
    ("z", "rollout", "picked", "outside"),
    [
        (2.49, 5, 3, False),  # the paper's example: 2.51 became 3, and 2.49 follows
        (2.51, 4, 2, False),
        (1.6, 2, 1.5, True),  # beyond the bracket: one step towards the rollout, no further
        (1.6, 7, 2, True),
        (0.1, 9, 0, True),  # -0.5 recorded: towards it, but not across zero
        (-0.1, 1, 0, True),
        (-2.6, 12, -2, False),
        (-2.6, 4, -2, True),  # the other sign
        (3, 7, 3, False),  # on the grid: stays
        (9, 6, 6, False),  # clipped to the end of the grid
    ],
)
def test_full_codes_by_hand(z, rollout, picked, outside):
    values, flags = guided_values([z] * 16, [rollout] * 16, "codes")
    assert (values[0], flags[0]) == (picked, outside)


@pytest.mark.parametrize(
    ("z", "rollout", "codes", "low2", "low1"),
    [
        (2.6, 4, 2, 2, 2),  # within the bracket all three agree
        (2.4, 5, 3, 3, 3),
        (1.6, 2, 1.5, 1.5, 2),  # outside it, one bit picks the far side; two bits do not
        (0.1, 9, 0, 0.5, 0.5),  # no low bit tells of the sign
        (4.1, 5, 4, 4, 6),
    ],
)
def test_where_the_encodings_differ(z, rollout, codes, low2, low1):
    expected = dict(zip(ENCODINGS, (codes, low1, low2), strict=True))
    for encoding, value in expected.items():
        assert guided_values([z] * 16, [rollout] * 16, encoding)[0][0] == value


def test_with_low1_nothing_is_seen_out_of_its_bracket():
    rollout, trained = (edges.draw(*SHAPE, seed=seed) for seed in (0, 1))
    guide = guide_of(quantize(rollout, "nvfp4"), "low1")
    assert not round_guided(trained, guide)[1].any()
    guide = guide_of(quantize(rollout, "nvfp4"), "codes")
    assert round_guided(trained, guide)[1].mean() > 0.3


@every_format
@every_encoding
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_noisy_tensors_equal_the_oracle(fmt, encoding, dtype):
    rollout = edges.draw(*SHAPE)
    trained = rollout * (1 + 0.1 * edges.draw(*SHAPE, seed=1, spread=0))
    if dtype == "bfloat16":
        rollout, trained = edges.to_bfloat16(rollout), edges.to_bfloat16(trained)
    q, _ = round_guided(trained, guide_of(quantize(rollout, fmt), encoding))
    expected = oracle.quantize_guided(trained, oracle.quantize(rollout, fmt), fmt, encoding)
    oracle.assert_same(q, expected)
    oracle.assert_same_bits(dequantize(q), expected.values)


# ---- The guarantee, and replay

TENSORS = npst.arrays(
    np.float32,
    (2, 64),
    elements=st.floats(-100, 100, width=32).filter(lambda v: v == 0 or abs(v) > 1e-6),
    fill=st.just(np.float32(0.7)),
)


@jax.jit
def _picked_and_nearest(trained, guide):
    q, outside = quantizer.round_guided(trained, guide)
    z = block_scaled.normalise(trained, guide.scales, guide.outer)
    decode = q.element.decode
    return decode(block_scaled.unpack(q)), decode(q.element.encode(z)), outside


@every_format
@settings(max_examples=25)
@given(rollout=TENSORS, trained=TENSORS, share=st.sampled_from([0.01, 0.1, 1.0]))
def test_codes_never_move_away_from_the_rollout(fmt, rollout, trained, share):
    """|q* - q_rollout| <= |q_nearest - q_rollout| at the same scale, for any two tensors."""
    trained = (1 - share) * rollout + share * trained
    q = quantize(rollout, fmt)
    recorded = oracle.values_of(oracle.grid_of(fmt))[unpacked(q)]
    picked, nearest, outside = _picked_and_nearest(trained, guide_of(q, "codes"))
    assert np.all(np.abs(picked - recorded) <= np.abs(nearest - recorded))
    inside = ~np.asarray(outside) & (picked != nearest)  # moved, and fully: onto the rollout's code
    np.testing.assert_array_equal(np.asarray(picked)[inside], recorded[inside])


@every_format
@every_encoding
@settings(max_examples=10)
@given(x=TENSORS)
def test_replaying_what_was_rounded_changes_nothing(fmt, encoding, x):
    q = quantize(x, fmt)
    replayed, outside = round_guided(x, guide_of(q, encoding))
    np.testing.assert_array_equal(replayed.codes, q.codes)
    assert not outside.any()


@every_encoding
def test_self_replay_of_every_code_at_every_scale(encoding):
    shape = np.concatenate([np.linspace(-1, 1, 16), np.linspace(0.3, 1, 16)]).astype(np.float32)
    x = 6 * oracle.E4M3[:, None] * shape
    q = quantize(x, "nvfp4", np.float32(1))
    np.testing.assert_array_equal(round_guided(x, guide_of(q, encoding))[0].codes, q.codes)


@every_format
def test_replaying_the_decoded_values_gives_the_same_codes(fmt):
    """Its z lies within a rounding of the grid, where brackets change: the codes hold there."""
    q = quantize(edges.draw(*SHAPE), fmt)
    values = dequantize(q)
    for encoding in ("codes", "low1"):
        again, _ = round_guided(values, guide_of(q, encoding))
        np.testing.assert_array_equal(again.codes, q.codes)


# ---- Noise: what the method is for


@pytest.fixture(scope="module")
def noisy():
    """A rollout's tensor and the trainer's, 0.3% of the value apart, in full precision."""
    rollout = edges.draw(*SHAPE, spread=0.5)
    return rollout, rollout * (1 + 0.003 * edges.draw(*SHAPE, seed=1, spread=0))


@every_format
@every_encoding
def test_a_third_of_a_percent_of_noise_is_repaired_completely(fmt, encoding, noisy):
    rollout, trained = noisy
    q, independent = quantize(rollout, fmt), quantize(trained, fmt)
    mismatch = np.mean(unpacked(independent) != unpacked(q))
    assert 0.001 < mismatch < 0.05
    guided, outside = round_guided(trained, guide_of(q, encoding))
    np.testing.assert_array_equal(guided.codes, q.codes)
    oracle.assert_same_bits(dequantize(guided), dequantize(q))
    assert not outside.any()


def test_a_bit_that_says_up_or_down_would_not_do(noisy):
    """Such a bit moves the errors from midpoints to grid points, where brackets change: it repairs
    some of the mismatches of rounding to nearest and makes others; the low bit leaves none.
    """
    rollout, trained = noisy
    q = quantize(rollout, "nvfp4")
    arrays = q.scales.astype(jnp.float32), q.outer

    def low_and_high(x):
        z = block_scaled.normalise(x, *arrays)
        return *map(np.asarray, e2m1.bracket(z)), np.asarray(z)

    low, high, _ = low_and_high(rollout)
    went_up = (unpacked(q) & 7) == high
    low, high, z = low_and_high(trained)
    up_or_down = oracle.with_sign(np.where(went_up, high, low), z)
    nearest = unpacked(quantize(trained, "nvfp4"))
    low1 = unpacked(round_guided(trained, guide_of(q, "low1"))[0])
    mismatches = [np.sum(codes != unpacked(q)) for codes in (nearest, up_or_down, low1)]
    assert mismatches[0] > 0
    assert mismatches[1] > 0
    assert mismatches[2] == 0


def test_the_recorded_scales_are_part_of_the_guidance(noisy):
    rollout, trained = noisy
    q, own = quantize(rollout, "nvfp4"), quantize(trained, "nvfp4")
    guided, _ = round_guided(trained, guide_of(q, "low1"))
    assert (np.asarray(own.scales) != np.asarray(q.scales)).any()
    oracle.assert_same_bits(guided.outer, q.outer)
    np.testing.assert_array_equal(
        np.asarray(guided.scales).view(np.uint8), np.asarray(q.scales).view(np.uint8)
    )


# ---- The record


@pytest.mark.parametrize(
    ("fmt", "encoding", "bits"),
    [
        ("nvfp4", "codes", 4.5),
        ("nvfp4", "low1", 1.5),
        ("nvfp4", "low2", 2.5),
        ("nvfp4_4over6", "low1", 1.5),
        ("mxfp4", "codes", 4.25),
        ("mxfp4", "low1", 1.25),
        ("mxfp4", "low2", 2.25),
        ("mxfp8", "codes", 8.25),
        ("mxfp8", "low1", 1.25),
        ("mxfp8", "low2", 2.25),
    ],
)
def test_bytes_of_a_value(fmt, encoding, bits):
    """Width * (b + 8/block) / 8 bytes a token, 4 for the outer scale. Source: method.md 1.11."""
    guide = jax.eval_shape(
        lambda x: quantizer.encode(formats.quantize(x, fmt), encoding),
        jax.ShapeDtypeStruct((3, 5, 2048), jnp.bfloat16),
    )
    sizes = [leaf.size * leaf.dtype.itemsize / (3 * 5) for leaf in jax.tree.leaves(guide)]
    assert sizes[0] + sizes[1] == 2048 * bits / 8
    assert sizes[2:] == ([4] if fmt in oracle.NV else [])
    assert encodings.bits_of(encoding, fmt) == bits // 1


@every_encoding
def test_the_record_holds_the_low_bits_the_first_in_the_low_end(encoding):
    codes = np.array([[1, 2, 15, 7, 0, 9, 12, 3, 4, 4, 5, 6, 8, 10, 11, 13]], np.uint8)
    expected = {
        "codes": [0x21, 0x7F, 0x90, 0x3C, 0x44, 0x65, 0xA8, 0xDB],
        "low1": [0b10101101, 0b11000100],
        "low2": [0b11111001, 0b11000100, 0b10010000, 0b01111000],
    }
    np.testing.assert_array_equal(unit_guide(codes, encoding).bits[0], expected[encoding])


@every_format
@every_encoding
def test_a_guide_of_zero_bytes_is_padding(fmt, encoding):
    x = edges.draw(*SHAPE)
    like = guide_of(quantize(x, fmt), encoding)
    guide = jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), like)
    q, outside = round_guided(x, guide)
    values = np.asarray(dequantize(q))
    if fmt in oracle.NV:
        oracle.assert_same_bits(values, np.zeros_like(x))
    else:  # the smallest E8M0 scale is not zero, and backends differ in keeping 2^-127
        assert np.abs(values).max() <= oracle.grid_of(fmt)[-1] * 2.0**-127
    assert not outside.any()

    def loss(x, guide):
        q, _ = quantizer.round_guided(x, guide)
        operand = quantizer.quantize_operand(x, q, jnp.bfloat16)
        values = operand.values.astype(jnp.float32)
        return jnp.sum(values if operand.outer is None else values * operand.outer[:, None])

    gradient = np.asarray(jax.jit(jax.grad(loss))(x, guide))
    assert np.isfinite(gradient).all()
    if fmt in oracle.NV:
        assert not gradient.any()


def test_a_guide_scans_and_slices_like_an_array():
    x = edges.draw(6 * 4, 64).reshape(6, 4, 64)
    guide = guide_of(quantize(x, "nvfp4"), "low1")

    def layer(count, xs):
        return count + 1, quantizer.round_guided(*xs)[0].codes

    _, codes = jax.jit(lambda x, guide: jax.lax.scan(layer, 0, (x, guide)))(x, guide)
    np.testing.assert_array_equal(codes, quantize(x, "nvfp4").codes)
    part, _ = round_guided(x[2], jax.tree.map(lambda leaf: leaf[2], guide))
    np.testing.assert_array_equal(part.codes, codes[2])


def test_an_unknown_encoding_is_an_error():
    with pytest.raises(ValueError, match=r"'low3'.*'codes', 'low1', 'low2'"):
        quantizer.encode(quantize(edges.draw(1, 16), "nvfp4"), "low3")


def test_round_value_rounds_to_nearest_where_there_is_no_guide(noisy):
    rollout, trained = noisy
    q = quantize(rollout, "nvfp4")
    rounded = jax.jit(lambda x, guide: quantizer.round_value(x, "nvfp4", "row", guide))
    nearest, guided = rounded(trained, None), rounded(trained, guide_of(q, "low1"))
    np.testing.assert_array_equal(nearest.codes, quantize(trained, "nvfp4").codes)
    np.testing.assert_array_equal(guided.codes, q.codes)


# ---- Gradients

UPSTREAM = edges.draw(16, 64, seed=5)


@every_encoding
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_guided_rounding_is_the_identity(encoding, dtype):
    """Saturated values, zero rows and zero scales included: nothing masks it."""
    x = jnp.asarray(edges.FINITE_EDGES, dtype)
    guide = guide_of(quantize(x / 3, "nvfp4"), encoding)  # every block saturates
    y, pull_back = jax.vjp(lambda x: quantizer.quantize_guided(x, guide), x)
    assert (y.dtype, y.shape) == (jnp.float32, x.shape)
    (dx,) = pull_back(jnp.asarray(UPSTREAM))
    assert dx.dtype == x.dtype
    np.testing.assert_array_equal(dx, jnp.asarray(UPSTREAM, dtype))
    twice = jax.jit(jax.grad(lambda x: jnp.sum(2 * quantizer.quantize_guided(x, guide))))(x)
    assert np.all(twice.astype(jnp.float32) == 2)


def test_the_guide_gets_no_gradient():
    x = edges.draw(4, 64)
    guide = guide_of(quantize(x, "nvfp4"), "low1")
    loss = lambda x, guide: jnp.sum(jnp.square(quantizer.quantize_guided(x, guide)))
    dx, dguide = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))(x, guide)
    assert dx.any()
    assert isinstance(dguide, Guide)
    assert dguide.bits.dtype == jax.dtypes.float0
    assert not dguide.scales.astype(jnp.float32).any()
    assert not dguide.outer.any()


@every_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fake_quantize_rounds_and_its_gradient_is_the_identity(fmt, dtype):
    x = jnp.asarray(edges.FINITE_EDGES, dtype)
    fake = jax.jit(functools.partial(quantizer.fake_quantize, fmt=fmt))
    y, pull_back = jax.vjp(fake, x)
    oracle.assert_same_bits(y, oracle.quantize(np.asarray(x), fmt).values)
    (dx,) = pull_back(jnp.asarray(UPSTREAM))
    assert dx.dtype == x.dtype
    np.testing.assert_array_equal(dx, jnp.asarray(UPSTREAM, dtype))


def test_fake_quantize_under_a_given_outer_scale_gives_it_no_gradient():
    x, outer = edges.draw(4, 64), np.float32(0.01)
    loss = lambda x, outer: jnp.sum(jnp.square(quantizer.fake_quantize(x, outer=outer)))
    dx, douter = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, outer)
    np.testing.assert_array_equal(dx, 2 * oracle.quantize(x, "nvfp4", outer).values)
    assert douter == 0


@every_format
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_the_gradient_through_a_product_is_that_of_a_plain_product(fmt, guided, dtype, tolerance):
    """Outer scales are applied after the dot, and the gradient still is upstream @ W."""
    x, w = edges.draw(16, 64), edges.draw(24, 64, seed=2, spread=0.3)
    upstream = edges.draw(16, 24, seed=3, spread=0.3)
    guide = guide_of(quantize(x * 1.01, fmt), "low1") if guided else None
    qw = quantize(w, fmt, "tensor")

    def product(x, w):
        qx = quantizer.round_value(x, fmt, "row", guide)
        a = quantizer.quantize_operand(x, qx, jnp.dtype(dtype))
        b = quantizer.quantize_operand(w, qw, jnp.dtype(dtype))
        y = jnp.einsum("nd,fd->nf", a.values, b.values, preferred_element_type=jnp.float32)
        return y if fmt not in oracle.NV else y * a.outer[:, None] * b.outer

    y, pull_back = jax.vjp(jax.jit(product), x, w)
    dx, dw = pull_back(jnp.asarray(upstream))
    qx = quantizer.round_value(x, fmt, "row", guide)
    x_values, w_values = (np.asarray(dequantize(q), np.float64) for q in (qx, qw))
    for actual, expected in (
        (y, x_values @ w_values.T),
        (dx, upstream @ w_values),
        (dw, upstream.T @ x_values),
    ):
        assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def test_an_operand_has_a_gradient_in_the_dtype_of_its_source():
    x = jnp.asarray(edges.draw(4, 64), jnp.bfloat16)

    def loss(x):
        operand = quantizer.quantize_operand(x, formats.quantize(x, "nvfp4"), jnp.float32)
        return jnp.sum(operand.values * operand.outer[:, None])

    dx = jax.jit(jax.grad(loss))(x)
    assert dx.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dx.astype(jnp.float32), np.ones(x.shape))


# ---- Every path gives the same bits


@every_format
@every_encoding
def test_eager_jit_vmap_and_eight_devices(fmt, encoding):
    rollout = np.concatenate([edges.EDGES, edges.draw(16, 192)], axis=1)
    with np.errstate(invalid="ignore"):
        trained = rollout * (1 + 0.05 * edges.draw(*rollout.shape, seed=1, spread=0))
    q = quantize(rollout, fmt)
    guide = guide_of(q, encoding)
    expected = oracle.quantize_guided(trained, oracle.read(q), fmt, encoding)
    rows = NamedSharding(jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,)), P("rows"))
    sharded = round_guided(*jax.device_put((jnp.asarray(trained), guide), rows))
    results = {
        "eager": quantizer.round_guided(jnp.asarray(trained), guide),
        "jit": round_guided(trained, guide),
        "vmap": jax.jit(jax.vmap(quantizer.round_guided))(trained, guide),
        "constants": jax.jit(lambda: quantizer.round_guided(jnp.asarray(trained), guide))(),
        "sharded": sharded,
    }
    for result, outside in results.values():
        oracle.assert_same(result, expected)
        np.testing.assert_array_equal(outside, results["eager"][1])
    assert sharded[0].codes.sharding.spec[0] == "rows"
    assert sharded[1].sharding.spec[0] == "rows"
    values = jax.jit(quantizer.quantize_guided)(trained, guide)
    oracle.assert_same_bits(values, expected.values)
