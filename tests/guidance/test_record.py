"""What a recording keeps: which layers and sites, errors, and the Guidance that holds it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.formats import nvfp4
from trace_jax.guidance import policy, quantizer, record
from trace_jax.guidance.record import Guidance

KV = policy.resolve([("attention/[kv]", "nvfp4")])


@pytest.mark.parametrize(
    ("layers", "depth", "kept"),
    [
        ("all", 3, (0, 3)),
        ("latter_half", 40, (20, 40)),  # the paper's
        ("latter_half", 3, (1, 3)),
        ("first_half", 3, (0, 1)),
        ("latter_quarter", 8, (6, 8)),
        ("latter_eighth", 8, (7, 8)),
    ],
)
def test_shares_of_the_layers(layers, depth, kept):
    made = record.recording("low1", ("*",), layers, depth, KV)
    assert (made.first_layer, made.last_layer) == kept
    assert made.sites == KV.sites
    assert made.sequences is None
    assert hash(made) == hash(record.recording("low1", ["attention/*"], layers, depth, KV))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("low3", ("*",), "all", 4), r"unknown guidance encoding 'low3'.*'codes', 'low1', 'low2'"),
        (("low1", ("*",), "last", 4), r"guidance.layers='last'.*'all'.*'latter_half'"),
        (
            ("low1", ("*",), "latter_quarter", 3),
            r"'latter_quarter' of 3 layers is none; choose 'all'",
        ),
        (("low1", ("experts/in",), "all", 4), r"'experts/in' matches nothing; sites: attention/k"),
    ],
)
def test_recordings_that_mean_nothing(arguments, message):
    with pytest.raises(ValueError, match=message):
        record.recording(*arguments, KV)


def test_no_site_is_quantized():
    with pytest.raises(ValueError, match=r"'\*' matches nothing; sites: none"):
        record.recording("codes", ("*",), "all", 4, policy.NOTHING)


@functools.cache
def guidance(encoding, first=1, last=3):
    """Of random K and V [layers, B 2, T 3, K 2, C 32] in layers first to last."""
    x = jax.random.normal(jax.random.key(0), (last - first, 2, 3, 2, 32))
    encode = jax.jit(lambda x: quantizer.encode(nvfp4.quantize(x), encoding))
    return Guidance({site: encode(x + i) for i, site in enumerate(KV.sites)}, first, last)


def test_a_layer_finds_its_own_guides():
    kept = guidance("codes")
    at_layer = jax.jit(lambda layer: kept.at_layer(layer))
    for layer, row in ((1, 0), (2, 1), (0, 0), (3, 1)):  # outside: clamped, and not covered
        picked = at_layer(layer)
        for site, guide in picked.items():
            assert np.array_equal(guide.bits, kept.guides[site].bits[row])
            assert np.array_equal(guide.outer, kept.guides[site].outer[row])
    assert [bool(kept.covers(jnp.int32(i), 4)) for i in range(4)] == [False, True, True, False]
    assert guidance("codes", 0, 4).covers(jnp.int32(2), 4) is True  # known when traced: no branch


@pytest.mark.parametrize(("encoding", "bits"), [("codes", 4), ("low2", 2), ("low1", 1)])
def test_bytes_per_token(encoding, bits):
    """width * (b + 8/16) / 8 a site and layer, and 4 bytes an outer scale (method.md 1.11)."""
    width, heads = 64, 2
    assert record.bytes_per_token(guidance(encoding)) == 2 * 2 * (
        width * (bits + 0.5) / 8 + 4 * heads
    )


def test_bytes_per_token_of_the_papers_model():
    """7.5 KiB for 20 layers of one 2048-wide input at 1 bit and block scales (method.md 1.5)."""
    shape = (20, 1, 1, 2048)
    guide = jax.eval_shape(lambda x: quantizer.encode(nvfp4.quantize(x), "low1"), jnp.zeros(shape))
    outer_scales = 20 * 4
    kept = record.bytes_per_token(Guidance({"experts/in": guide}, 20, 40))
    assert kept == 7.5 * 1024 + outer_scales


@pytest.mark.parametrize("encoding", ["low1", "low2", "codes"])
def test_full_codes_reduce_to_what_would_have_been_recorded(encoding):
    quantized = policy.resolve([("attention/[kv]", "nvfp4")])
    wanted = record.recording(encoding, ("attention/v",), "latter_quarter", 4, quantized)
    reduced = record.reduce(guidance("codes", 2, 4), wanted)
    expected = guidance(encoding, 2, 4).guides["attention/v"]
    assert set(reduced.guides) == {"attention/v"}
    assert (reduced.first_layer, reduced.last_layer) == (3, 4)
    last = jax.tree.map(lambda a: a[1:], expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, reduced.guides["attention/v"], last))
