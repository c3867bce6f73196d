"""The emulated noise of another engine: how large, how drawn, and where it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.small_model import (
    CFG,
    EVERYTHING,
    SITE_LAYERS,
    SITES,
    masters,
    quick_forward,
    tokens,
)
from trace_jax.guidance import policy, record
from trace_jax.models.layer_context import EngineNoise, LayerContext

FLOAT32 = jnp.dtype("float32")
X = jnp.asarray(np.random.default_rng(0).normal(size=(64, 256)), jnp.float32).at[0].set(0)


def context(relative, key=0, fmt=policy.NOTHING):
    noise = None if relative is None else EngineNoise(jax.random.key(key), relative)
    return LayerContext(fmt, FLOAT32, noise=noise)


def seen(site, *arguments):
    return np.asarray(context(*arguments).quantize(site, X)[0].values)


@pytest.mark.parametrize("relative", [0.002, 0.05])
def test_it_is_gaussian_and_relative_to_each_value(relative):
    noisy = seen("attention/in", relative)
    assert not np.any(noisy[0])  # zeros stay
    ratio = noisy[1:] / np.asarray(X)[1:] - 1
    assert np.std(ratio) == pytest.approx(relative, rel=0.02)
    assert abs(np.mean(ratio)) < relative / 20
    assert np.mean(np.abs(ratio) < relative) == pytest.approx(0.683, abs=0.01)


def test_each_site_and_key_has_its_own():
    drawn = [
        seen("attention/in", 0.01),
        seen("attention/out", 0.01),
        seen("attention/in", 0.01, 1),
    ]
    assert np.array_equal(drawn[0], seen("attention/in", 0.01))
    for i, j in ((0, 1), (0, 2), (1, 2)):
        left, right = (drawn[k][1:] / np.asarray(X)[1:] - 1 for k in (i, j))
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.03


def test_without_noise_nothing_changes():
    assert np.array_equal(seen("attention/in", None), X)
    assert np.array_equal(seen("attention/in", 0.0), X)


def test_it_comes_before_rounding_and_moves_a_few_codes():
    everything = policy.resolve([("*", "nvfp4")], SITES)
    codes = [
        np.asarray(context(relative, 0, everything).quantize("experts/in", X)[1].codes)
        for relative in (None, 0.002, 0.05)
    ]
    few, many = (np.mean(codes[0] != other) for other in codes[1:])
    assert 0 < few < 0.05 < many


def test_bfloat16_is_the_rounding_and_nothing_else():
    bfloat16 = lambda wanted: LayerContext(
        policy.NOTHING, FLOAT32, noise=EngineNoise(jax.random.key(0), 0.0, wanted)
    )
    values = lambda wanted: bfloat16(wanted).quantize("attention/in", X)[0].values
    assert np.array_equal(values(True), X.astype(jnp.bfloat16).astype(jnp.float32))
    assert np.array_equal(jax.jit(values)(True), values(True))  # XLA skips a mere pair of casts
    assert np.array_equal(values(False), X)


def test_one_value_a_layer_touches_its_layer_only():
    """And every layer has its own draws, also under one value for all."""
    key = jax.random.key(0)
    second = EngineNoise(key, jnp.array([0.0, 0.01]), jnp.array([True, False]))
    first, last = second.at_layer(0), second.at_layer(1)
    assert (first.relative, first.bfloat16) == (0, True)
    assert (last.relative, last.bfloat16) == (jnp.float32(0.01), False)
    same = EngineNoise(key, 0.01)
    assert np.array_equal(
        same.at_layer(1).disturb("attention/in", X), last.disturb("attention/in", X)
    )
    assert not np.array_equal(
        same.at_layer(0).disturb("attention/in", X), last.disturb("attention/in", X)
    )


@pytest.mark.parametrize("layer", [0, 1])
def test_a_forward_differs_from_the_noisy_layer_on(layer):
    full = record.recording("codes", ("*",), "all", SITE_LAYERS, EVERYTHING)
    noise = EngineNoise(jax.random.key(0), 0.05 * jax.nn.one_hot(layer, CFG.num_layers))
    clean, noisy = (
        quick_forward(
            masters(), tokens(), CFG, policy=EVERYTHING, dtype=FLOAT32, records=(full,), noise=given
        ).recorded[0]
        for given in (noise._replace(relative=jnp.zeros(CFG.num_layers)), noise)
    )
    before = jax.tree.map(
        lambda a, b: bool(np.array_equal(a[:layer], b[:layer])), clean.guides, noisy.guides
    )
    assert jax.tree.all(before)
    codes = [guidance.guides["attention/in"].bits[layer] for guidance in (clean, noisy)]
    assert not np.array_equal(*codes)


def test_rows_of_experts_get_none():
    """They follow from products of FP4 operands, which every engine computes alike."""
    everything = policy.resolve([("*", "nvfp4")], SITES)
    rows = [
        context(relative, 0, everything).quantize_under("experts/mid", X, None)[1]
        for relative in (None, 0.05)
    ]
    assert jax.tree.all(jax.tree.map(np.array_equal, *rows))
