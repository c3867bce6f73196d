"""The emulated noise of another engine: how large, how drawn, and where it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.small_model import SITES
from trace_jax.guidance import policy
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


def test_rows_of_experts_get_none():
    """They follow from products of FP4 operands, which every engine computes alike."""
    everything = policy.resolve([("*", "nvfp4")], SITES)
    rows = [
        context(relative, 0, everything).quantize_under("experts/mid", X, None)[1]
        for relative in (None, 0.05)
    ]
    assert jax.tree.all(jax.tree.map(np.array_equal, *rows))
