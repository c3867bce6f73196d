"""Mismatch sums of two roundings written down code by code, against sums by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.formats import block_scaled
from trace_jax.guidance import encoding, mismatch, quantizer
from trace_jax.guidance.record import Guidance

# One site, L 2, B 1, T 3, one block of 16. Values of codes 0..7: 0, .5, 1, 1.5, 2, 3, 4, 6.
CODES = np.zeros((2, 1, 3, 16), np.uint8)
CODES[..., 0] = 2  # 1
CODES[..., 1] = 7  # 6
SCALES = np.full((2, 1, 3, 1), 2.0)
OUTER = np.full((2, 1, 3), 0.5, np.float32)
VALID_BT = np.array([[1, 1, 0]], np.float32)


def guidance(codes, scales=SCALES, outer=OUTER):
    scales = jnp.asarray(scales).astype(jnp.float8_e4m3fn)
    q = block_scaled.pack(jnp.asarray(codes), scales, jnp.asarray(outer), "nvfp4")
    return Guidance({"experts/in": quantizer.encode(q, "codes")}, (("experts/in", (0, 1)),))


def compare(ours):
    return mismatch.compare(ours, guidance(CODES), VALID_BT)["experts/in"]


def test_equal_sides():
    sums = compare(guidance(CODES))
    assert sums.codes.tolist() == sums.scales.tolist() == sums.difference.tolist() == [0, 0]
    assert sums.values.tolist() == [32, 32]  # 2 valid tokens of 16 values
    assert sums.blocks.tolist() == [2, 2]
    assert sums.reference.tolist() == [2 * (1 + 36)] * 2  # block scale 2 x outer scale 0.5 = 1


def test_codes_that_differ():
    codes = CODES.copy()
    codes[0, 0, 0, 0] = 3  # 1 -> 1.5
    codes[0, 0, 1, 5] = 9  # 0 -> -0.5
    codes[1, 0, 1, 1] = 6  # 6 -> 4
    codes[1, 0, 2] = 7  # not valid
    sums = compare(guidance(codes))
    assert sums.codes.tolist() == [2, 1]
    assert sums.difference.tolist() == [0.25 + 0.25, 4]
    assert sums.code_rate.tolist() == [2 / 32, 1 / 32]
    assert sums.scale_rate.tolist() == [0, 0]
    assert sums.d_act.tolist() == pytest.approx([np.sqrt(0.5 / 74), np.sqrt(4 / 74)])
    total = sums.total()
    assert (float(total.codes), float(total.values)) == (3, 64)
    assert float(total.d_act) == pytest.approx(np.sqrt(4.5 / 148))


def test_rows_restored_are_those_whose_every_code_and_scale_agree():
    """Two sites, one with two rows a token (K by head): 2 layers x 2 valid tokens x (1 + 2)."""

    def hashed(codes, by_head, scales=SCALES):
        found = {}
        for site, at in {"experts/in": codes, "attention/k": by_head}.items():
            shape = at.shape[:-1]
            scale = jnp.asarray(
                np.broadcast_to(scales[..., :1], (*shape, 1))
                if at is codes
                else np.full((*shape, 1), 2.0)
            ).astype(jnp.float8_e4m3fn)
            q = block_scaled.pack(jnp.asarray(at), scale, jnp.ones(shape), "nvfp4")
            found[site] = encoding.encode(q, encoding.HASH)
        return Guidance(found, (("experts/in", (0, 1)), ("attention/k", (0, 1))))

    by_head = np.stack([CODES, CODES], axis=3)
    rollout, codes, keys, scales = (
        hashed(CODES, by_head),
        CODES.copy(),
        by_head.copy(),
        SCALES.copy(),
    )
    assert mismatch.rows_restored(rollout, rollout, VALID_BT) == 1
    codes[0, 0, 0, 3] = 1
    codes[0, 0, 2, 3] = 1  # not valid
    keys[1, 0, 1, 1, 15] = 8
    scales[1, 0, 1] = 2.25
    ours = hashed(codes, keys, scales)
    assert mismatch.rows_restored(ours, rollout, VALID_BT) == pytest.approx(1 - 3 / 12)


def test_scales_that_differ():
    scales = SCALES.copy()
    scales[0, 0, 1] = 2.25
    scales[1, 0, 2] = 4  # not valid
    sums = compare(guidance(CODES, scales))
    assert sums.codes.tolist() == [0, 0]
    assert sums.scales.tolist() == [1, 0]
    assert sums.scale_rate.tolist() == [0.5, 0]
    # Half of 0.25 more a unit of code.
    assert sums.difference.tolist() == pytest.approx([0.125**2 * (1 + 36), 0])


def test_an_outer_scale_shows_in_the_values_only():
    outer = OUTER.copy()
    outer[1, 0, 0] = 0.75
    sums = compare(guidance(CODES, SCALES, outer))
    assert sums.codes.tolist() == sums.scales.tolist() == [0, 0]
    assert sums.difference.tolist() == [0, 0.5**2 * (1 + 36)]


def test_sums_add_up_over_sites_and_batches():
    codes = CODES.copy()
    codes[0, 0, 0, 0] = 3
    parts = [compare(guidance(CODES)), compare(guidance(codes)), compare(guidance(codes))]
    added = mismatch.add(parts)
    assert added.codes.tolist() == [2, 0]
    assert added.values.tolist() == [96, 96]
    assert float(added.total().code_rate) == pytest.approx(2 / 192)


def test_only_what_the_rollout_recorded_is_compared():
    ours = guidance(CODES)
    layers = (*ours.layers, ("attention/k", (0, 1)))
    ours = Guidance(ours.guides | {"attention/k": ours.guides["experts/in"]}, layers)
    assert set(mismatch.compare(ours, guidance(CODES), VALID_BT)) == {"experts/in"}


def test_blocks_from_nan_are_counted_where_tokens_count():
    scales = SCALES.copy()
    scales[0, 0, 1] = scales[0, 0, 2] = np.nan  # the latter is padding
    for sums in (compare(guidance(CODES, scales)), compare(guidance(CODES))):
        assert sums.nan_blocks.tolist() == [int(np.isnan(sums.difference[0])), 0]


def test_sums_over_the_layers_of_each_site():
    """Site a lies in layers 0 and 2, site b in layers 1 and 2; wanted: layers 1 and 2 of both."""
    codes = CODES.copy()
    codes[0, 0, 0, 0] = codes[1, 0, 0, 0] = codes[1, 0, 1, 0] = 3  # 1 in the first layer, 2 after
    sites = {"a": compare(guidance(codes)), "b": compare(guidance(codes))}
    present = (("a", (0, 2)), ("b", (1, 2)))
    wanted = (("a", (1, 2)), ("b", (1, 2)), ("c", (1, 2)))
    found = mismatch.of_layers(sites, present, wanted)
    assert float(found.codes) == 2 + (1 + 2)
    assert float(found.values) == 3 * 32
    assert float(mismatch.of_layers(sites, present, (("c", (0,)),)).values) == 0
