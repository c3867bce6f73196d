"""Encodings: what each keeps in bytes, self-replay, scale parities, the hash, every path."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.formats import edges, oracle
from trace_jax.formats import bits, block_scaled
from trace_jax.formats import quantize as formats
from trace_jax.formats.block_scaled import FORMATS
from trace_jax.guidance import encoding as encodings
from trace_jax.guidance import quantizer
from trace_jax.guidance.encoding import ENCODINGS

SHAPE = (16, 256)
SYNDROMES = [name for name in ENCODINGS if name.startswith("syndrome")]
RESTORING = ["codes", "low1", "low2", *SYNDROMES]
REFUSED = list(itertools.product(["nvfp4_4over6", "mxfp8"], SYNDROMES))
PAIRS = [pair for pair in itertools.product(FORMATS, ENCODINGS) if pair not in REFUSED]
every_format_and_encoding = pytest.mark.parametrize(("fmt", "encoding"), PAIRS)
quantize = jax.jit(formats.quantize, static_argnums=(1, 2))
dequantize = jax.jit(block_scaled.dequantize)
guide_of = jax.jit(encodings.encode, static_argnums=1)
round_guided = jax.jit(quantizer.round_guided)


def noisy(relative, shape=SHAPE, seed=1):
    x = edges.draw(*shape)
    return x, x * (1 + relative * edges.draw(*shape, seed=seed, spread=0))


def differing(q, other):
    """Share of codes that differ."""
    return np.mean(np.asarray(block_scaled.unpack(q)) != np.asarray(block_scaled.unpack(other)))


# ---- Bytes


@pytest.mark.parametrize(("fmt", "encoding"), [*PAIRS, *((fmt, "hash") for fmt in FORMATS)])
@pytest.mark.parametrize("width", [32, 64, 256, 2048])
def test_a_row_takes_the_bytes_that_are_stated(encoding, width, fmt):
    guide = jax.eval_shape(
        lambda x: encodings.encode(formats.quantize(x, fmt), encoding),
        jax.ShapeDtypeStruct((3, 5, width), jnp.float32),
    )
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(guide)) / 15
    assert held == encodings.row_bytes(encoding, width, fmt)


def test_the_syndrome_of_the_paper_s_row_is_a_quarter_of_a_bit_a_value():
    """3/16 of checks and 1/16 of scale parities, and 4 bytes for the outer scale."""
    assert encodings.row_bytes("syndrome", 2048, "nvfp4") == 2048 / 4 / 8 + 4
    assert encodings.row_bytes("low1", 2048, "nvfp4") == 2048 * 1.5 / 8 + 4
    assert encodings.row_bytes("codes", 2048, "nvfp4") == 2048 * 4.5 / 8 + 4
    assert [encodings.row_bytes(f"syndrome{k}", 2048, "nvfp4") for k in (2, 4, 6)] == [52, 84, 116]


def test_what_is_left_of_the_last_byte_goes_to_checks():
    checks = functools.partial(encodings.checks_of, "syndrome", fmt="nvfp4")
    assert [checks(width) for width in (128, 144, 256, 272)] == [24, 31, 48, 55]
    assert [checks(width) for width in (16, 32, 48, 64)] == [7, 14, 21, 28]  # a byte a block


# ---- What the trainer gets back


@every_format_and_encoding
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_self_replay_of_every_edge_case_has_zero_mismatches(fmt, encoding, dtype):
    x = np.concatenate([edges.EDGES, edges.draw(16, 192)], axis=1)
    x = edges.to_bfloat16(x) if dtype == "bfloat16" else x
    q = quantize(x, fmt)
    replayed, outside = round_guided(x, guide_of(q, encoding))
    oracle.assert_same(replayed, oracle.read(q))
    oracle.assert_same_bits(dequantize(replayed), dequantize(q))
    assert not outside.any()


@pytest.mark.parametrize(("fmt", "encoding"), [pair for pair in PAIRS if pair[1] in RESTORING])
def test_a_third_of_a_percent_of_noise_is_repaired_completely(fmt, encoding):
    rollout, trained = noisy(0.003)
    q = quantize(rollout, fmt)
    assert 5e-4 < differing(quantize(trained, fmt), q) < 0.05
    oracle.assert_same(round_guided(trained, guide_of(q, encoding))[0], oracle.read(q))


@pytest.mark.parametrize(("width", "left"), [(64, 0.06), (256, 0.02), (2048, 0)])
def test_a_quarter_of_a_bit_repairs_one_percent_of_noise(width, left):
    """Of 3 to 4% of codes and a tenth of the scales."""
    rollout, trained = noisy(0.01, (65536 // width, width))
    q, nearest = quantize(rollout, "nvfp4"), quantize(trained, "nvfp4")
    guided, _ = round_guided(trained, guide_of(q, "syndrome"))
    assert differing(nearest, q) > 0.02
    assert differing(guided, q) <= left * differing(nearest, q)
    scales = lambda q: np.asarray(q.scales, np.float32)
    assert np.mean(scales(nearest) != scales(q)) > 0.05
    assert np.mean(scales(guided) != scales(q)) < 1e-3


def test_scales_alone_and_bits_alone_are_half_of_the_record():
    rollout, trained = noisy(0.01)
    q, nearest = quantize(rollout, "nvfp4"), quantize(trained, "nvfp4")
    scales, _ = round_guided(trained, guide_of(q, "scales"))
    np.testing.assert_array_equal(bits.hold(scales.scales), bits.hold(q.scales))
    assert 0 < differing(scales, q) < differing(nearest, q)
    only_bits, _ = round_guided(trained, guide_of(q, "bits"))
    np.testing.assert_array_equal(bits.hold(only_bits.scales), bits.hold(nearest.scales))
    assert differing(only_bits, q) < 0.1 * differing(nearest, q)


def test_a_record_that_happens_to_be_all_zeros_is_no_padding():
    """One in 256 rows of a single block; told from padding by its outer scale."""
    rollout, trained = noisy(0.003, (8192, 16))
    q = quantize(rollout, "nvfp4")
    guide = guide_of(q, "syndrome")
    zeros = ~np.asarray(guide.bits).any(axis=-1)
    nearest = np.asarray(block_scaled.unpack(quantize(trained, "nvfp4")))
    wanted = np.asarray(block_scaled.unpack(q))
    assert (nearest != wanted)[zeros].any()
    guided = np.asarray(block_scaled.unpack(round_guided(trained, guide)[0]))
    np.testing.assert_array_equal(guided[zeros], wanted[zeros])


# ---- The parity of a scale


def test_every_nvfp4_scale_is_named_by_its_parity_up_to_one_code_away():
    """Each finite code 0 to 126 of the rollout, the trainer's amax on it and on either side."""
    code = np.arange(1, 127)
    value = np.asarray(bits.restore(jnp.asarray(code, jnp.uint8), jnp.float8_e4m3fn), np.float32)
    for shift in (-1, 0, 1):
        near = np.clip(code + shift, 0, 126).astype(np.uint8)
        amax = 6 * np.asarray(bits.restore(jnp.asarray(near), jnp.float8_e4m3fn), np.float32)
        lean = (0.75 * amax + 0.25 * 6 * value)[:, None] * np.linspace(-1, 1, 16, dtype=np.float32)
        scales = formats.scales_of_parity(lean, "nvfp4", jnp.ones(126), (code & 1)[:, None])
        np.testing.assert_array_equal(bits.hold(scales)[:, 0], code)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp4_floor"])
def test_every_mxfp4_scale_is_named_by_its_parity_within_half_a_power_of_two(fmt):
    exponent = np.arange(-60, 60)
    rollout = (2.0**exponent * 1.3)[:, None] * np.linspace(-1, 1, 32)
    rollout = rollout.astype(np.float32)
    scales = bits.hold(quantize(rollout, fmt).scales)
    for factor in (0.72, 1, 1.39):
        moved = formats.scales_of_parity(rollout * np.float32(factor), fmt, None, scales & 1)
        np.testing.assert_array_equal(bits.hold(moved), scales)


# ---- The hash


def test_equal_rows_have_equal_hashes_and_any_single_change_another():
    q = quantize(edges.draw(4, 64), "nvfp4")
    hashed = lambda q: np.asarray(guide_of(q, encodings.HASH).bits)
    same = hashed(q)
    codes = np.asarray(block_scaled.unpack(q))
    for place in range(64):
        changed = codes.copy()
        changed[:, place] = (changed[:, place] + 1) % 16
        other = block_scaled.pack(jnp.asarray(changed), q.scales, q.outer, q.fmt)
        assert (hashed(other) != same).any(axis=-1).all()
    for block in range(4):
        scales = np.asarray(bits.hold(q.scales)).copy()
        scales[:, block] ^= 1
        other = block_scaled.BlockScaled(
            q.codes, bits.restore(jnp.asarray(scales), q.scales.dtype), q.outer, q.fmt
        )
        assert (hashed(other) != same).any(axis=-1).all()


def test_hashes_of_different_rows_meet_by_chance_only():
    q = quantize(edges.draw(4096, 64), "nvfp4")
    words = np.asarray(guide_of(q, encodings.HASH).bits).astype(int) @ [1, 256]
    pairs = 4096 * 4095 / 2
    equal = sum(n * (n - 1) / 2 for n in np.unique(words, return_counts=True)[1])
    assert equal < 3 * pairs / 2**16


def test_no_trainer_can_follow_a_hash():
    with pytest.raises(ValueError, match="unknown guidance encoding 'hash'"):
        encodings.check_encoding(encodings.HASH)


@pytest.mark.parametrize(("fmt", "encoding"), REFUSED)
def test_a_format_of_which_parities_say_too_little(fmt, encoding):
    message = f"encoding '{encoding}' does not serve {fmt}: .*; choose one of .*'codes', 'low1'"
    with pytest.raises(ValueError, match=message):
        encodings.encode(quantize(edges.draw(1, 64), fmt), encoding)
    with pytest.raises(ValueError, match=message):
        encodings.row_bytes(encoding, 64, fmt)


# ---- Every path gives the same bits


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("encoding", ["syndrome", "scales", "bits"])
def test_eager_jit_vmap_and_eight_devices(fmt, encoding):
    rollout = np.concatenate([edges.EDGES, edges.draw(16, 192)], axis=1)
    with np.errstate(invalid="ignore"):
        trained = rollout * (1 + 0.003 * edges.draw(*rollout.shape, seed=1, spread=0))
    guide = guide_of(quantize(rollout, fmt), encoding)
    rows = NamedSharding(jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,)), P("rows"))
    eager, _ = quantizer.round_guided(jnp.asarray(trained), guide)
    sharded = round_guided(*jax.device_put((jnp.asarray(trained), guide), rows))[0]
    for result in (
        round_guided(trained, guide)[0],
        jax.jit(jax.vmap(quantizer.round_guided))(trained, guide)[0],
        sharded,
    ):
        oracle.assert_same(result, oracle.read(eager))
    assert sharded.codes.sharding.spec[0] == "rows"


@pytest.mark.parametrize("encoding", SYNDROMES)
def test_the_gradient_is_the_identity(encoding):
    x, trained = noisy(0.01, (4, 64))
    guide = guide_of(quantize(x, "nvfp4"), encoding)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(2 * quantizer.quantize_guided(x, guide))))
    np.testing.assert_array_equal(gradient(trained), np.full((4, 64), 2, np.float32))


def test_a_syndrome_of_zero_bytes_is_padding():
    like = guide_of(quantize(edges.draw(*SHAPE), "nvfp4"), "syndrome")
    guide = jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), like)
    q, _ = round_guided(edges.draw(*SHAPE), guide)
    assert not np.asarray(block_scaled.dequantize(q)).any()
