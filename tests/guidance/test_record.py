"""What a recording keeps: which layers and sites, errors, and the Guidance that holds it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.formats import nvfp4
from trace_jax.guidance import policy, quantizer, record
from trace_jax.guidance.record import Guidance

NAMES = ("attention/k", "attention/v", "experts/in")
KV = policy.resolve([("attention/[kv]", "nvfp4")], NAMES)
BOTH = policy.resolve([("*", "nvfp4")], NAMES)


def every(depth):
    """Each site in each of `depth` layers."""
    return {site: tuple(range(depth)) for site in NAMES}


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
    made = record.recording("low1", ("*",), layers, every(depth), KV)
    assert made.layers == tuple((site, tuple(range(*kept))) for site in KV.sites)
    assert made.sites == KV.sites
    assert made.sequences is None
    assert hash(made) == hash(record.recording("low1", ["attention/*"], layers, every(depth), KV))


def test_a_site_is_kept_in_those_layers_of_the_share_that_have_it():
    """A hybrid of eight layers, two of them attention."""
    found = every(8) | {"attention/k": (3, 7), "attention/v": (3, 7)}
    made = record.recording("low1", ("attention/k", "experts/in"), "latter_half", found, BOTH)
    assert made.layers == (("attention/k", (7,)), ("experts/in", (4, 5, 6, 7)))
    some = record.recording("low1", ("*",), "latter_quarter", found | {"attention/k": (3,)}, BOTH)
    assert some.sites == ("attention/v", "experts/in")
    with pytest.raises(ValueError, match="of 8 layers has none of attention/k; choose 'all'"):
        record.recording(
            "low1", ("attention/k",), "latter_eighth", found | {"attention/k": (3,)}, KV
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("low3", ("*",), "all", 4), r"unknown guidance encoding 'low3'.*'codes', 'low1', 'low2'"),
        (("low1", ("*",), "last", 4), r"guidance.layers='last'.*'all'.*'latter_half'"),
        (
            ("low1", ("*",), "latter_quarter", 3),
            r"'latter_quarter' of 3 layers has none of attention/k, attention/v; choose 'all'",
        ),
        (("low1", ("experts/in",), "all", 4), r"'experts/in' matches nothing; sites: attention/k"),
    ],
)
def test_recordings_that_mean_nothing(arguments, message):
    with pytest.raises(ValueError, match=message):
        record.recording(*arguments[:3], every(arguments[3]), KV)


def test_no_site_is_quantized():
    with pytest.raises(ValueError, match=r"'\*' matches nothing; sites: none"):
        record.recording("codes", ("*",), "all", every(4), policy.NOTHING)


@functools.cache
def guidance(encoding, first=1, last=3):
    """Of random K and V [layers, B 2, T 3, K 2, C 32] in layers first to last."""
    x = jax.random.normal(jax.random.key(0), (last - first, 2, 3, 2, 32))
    encode = jax.jit(lambda x: quantizer.encode(nvfp4.quantize(x), encoding))
    kept = tuple((site, tuple(range(first, last))) for site in KV.sites)
    return Guidance({site: encode(x + i) for i, site in enumerate(KV.sites)}, kept)


def test_a_layer_finds_its_own_guides():
    kept = guidance("codes")
    at_layer = jax.jit(lambda layer: kept.at_layer(layer, (0, 1, 2, 3)))
    for layer, row in ((1, 0), (2, 1), (0, None), (3, None)):
        picked = at_layer(layer)
        assert set(picked) == set(KV.sites)
        for site, (guide, covers) in picked.items():
            assert bool(covers) == (row is not None)
            if row is not None:
                assert np.array_equal(guide.bits, kept.guides[site].bits[row])
                assert np.array_equal(guide.outer, kept.guides[site].outer[row])


def test_what_is_known_when_traced_makes_no_branch():
    kept = guidance("codes", 0, 4)
    assert all(of.covers is True for of in kept.at_layer(jnp.int32(2), (0, 2)).values())
    assert kept.at_layer(jnp.int32(4), (4, 5)) == {}


def test_layers_apart_find_their_rows():
    """A hybrid: layers 3 and 7 have K and V, and each stands at its own place of the group."""
    guides = guidance("codes").guides
    kept = Guidance(guides, tuple((site, (3, 7)) for site in KV.sites))
    for layer, row in ((3, 0), (7, 1)):
        for site, (guide, covers) in kept.at_layer(jnp.int32(layer), (3, 7)).items():
            assert covers is True
            assert np.array_equal(guide.bits, guides[site].bits[row])


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
    kept = record.bytes_per_token(
        Guidance({"experts/in": guide}, (("experts/in", tuple(range(20, 40))),))
    )
    assert kept == 7.5 * 1024 + outer_scales


@pytest.mark.parametrize("encoding", ["low1", "low2", "codes"])
def test_full_codes_reduce_to_what_would_have_been_recorded(encoding):
    wanted = record.recording(encoding, ("attention/v",), "latter_quarter", every(4), KV)
    reduced = record.reduce(guidance("codes", 2, 4), wanted)
    expected = guidance(encoding, 2, 4).guides["attention/v"]
    assert set(reduced.guides) == {"attention/v"}
    assert reduced.layers == (("attention/v", (3,)),)
    last = jax.tree.map(lambda a: a[1:], expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, reduced.guides["attention/v"], last))


def test_layers_that_are_no_neighbours_cannot_be_kept_apart():
    guides, some = (
        guidance("codes", 0, 3).guides,
        record.Recording("codes", (("attention/k", (0, 2)),)),
    )
    with pytest.raises(ValueError, match=r"attention/k: layers \(0, 2\) are not neighbours"):
        record.keep(some, guides, {"attention/k": (0, 1, 2)})
    assert (
        record.keep(some, guides, {"attention/k": (0, 2, 5)}).guides["attention/k"].bits.shape[0]
        == 2
    )
