"""Hyper-connections against a float64 oracle written from the equations."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.guidance.policy import NOTHING
from trace_jax.models import config, hyper_connection
from trace_jax.models.hyper_connection import HyperConnection
from trace_jax.models.layer_context import LayerContext

CFG = config.tiny(config.get("qwen3_8_flash_next"))
B, T, D = 2, 3, CFG.hidden_size
STREAMS, RANK = CFG.hyper_connection.streams, CFG.hyper_connection.rank
SHAPES = {
    "norm": {"scale": (STREAMS * D,)},
    "down": (RANK, STREAMS * D),
    "up": (STREAMS * D, RANK),
    "inject": (STREAMS, STREAMS * D),
}
FLOAT32 = LayerContext(NOTHING, jnp.float32)
BF16 = LayerContext(NOTHING, jnp.bfloat16)


def values(shapes, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)
    return jax.tree.map(draw, shapes, is_leaf=lambda shape: isinstance(shape, tuple))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def oracle(params, x_BTsD):
    """What is read [B, T, D] and the gains [B, T, s], one token at a time."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    read, gains = np.zeros((B, T, D)), np.zeros((B, T, STREAMS))
    for b, t in np.ndindex(B, T):
        streams = []
        for c in range(STREAMS):
            x = np.float64(x_BTsD[b, t, c])
            scale = p["norm"]["scale"][c * D : (c + 1) * D]
            streams.append((1 + scale) * x / np.sqrt(np.mean(x * x) + CFG.rms_norm_eps))
        n = np.concatenate(streams)
        low = p["down"] @ n / STREAMS
        mix = sigmoid(p["up"] @ (low * sigmoid(low)))
        read[b, t] = (mix * n).reshape(STREAMS, D).mean(0)
        gains[b, t] = 2 * sigmoid(p["inject"] @ n / STREAMS)
    return read, gains


@functools.cache
def case():
    """Parameters, streams of very different sizes, and a block's output."""
    sizes = np.array([0.01, 1, 10, 100], np.float32)[:, None]
    return (
        values(SHAPES),
        values((B, T, STREAMS, D), seed=1) * sizes,
        values((B, T, D), seed=2),
    )


def connect(params, x_BTsD, y_BTD, context=FLOAT32):
    read, write = HyperConnection(CFG).apply({"params": params}, x_BTsD, context)
    return read, write(y_BTD)


def test_the_read_and_the_write():
    params, x, y = case()
    read, written = jax.jit(connect)(params, x, y)
    expected, gain = oracle(params, x)
    np.testing.assert_allclose(read, expected, atol=2e-6)
    np.testing.assert_allclose(
        written, x + gain[..., None] * np.asarray(y)[:, :, None], rtol=1e-6, atol=2e-6
    )
    assert read.dtype == written.dtype == jnp.float32


def test_the_last_one_only_reads():
    params, x, _ = case()
    reader = HyperConnection(CFG, inject=False)
    read_only = {name: leaf for name, leaf in params.items() if name != "inject"}
    read, write = reader.apply({"params": read_only}, x, FLOAT32)
    assert write is None
    np.testing.assert_allclose(read, oracle(params, x)[0], atol=2e-6)


def test_parameters():
    for inject in (True, False):
        init = functools.partial(HyperConnection(CFG, inject).init, context=FLOAT32)
        made = jax.eval_shape(init, jax.random.key(0), case()[1])["params"]
        shapes = {name: shape for name, shape in SHAPES.items() if inject or name != "inject"}
        assert jax.tree.map(lambda leaf: leaf.shape, nn.unbox(made)) == shapes


def test_streams_and_gains_stay_float32_where_products_take_bfloat16():
    params, x, y = case()
    read, written = jax.jit(functools.partial(connect, context=BF16))(params, x, y)
    expected, gain = oracle(params, x)
    assert read.dtype == written.dtype == jnp.float32
    assert 1e-4 < np.max(np.abs(read - expected)) < 3e-2
    np.testing.assert_allclose(
        written, x + gain[..., None] * np.asarray(y)[:, :, None], rtol=1e-6, atol=2e-6
    )


def test_every_parameter_gets_a_gradient():
    params, x, y = case()
    gradient = jax.jit(jax.grad(lambda p: sum(jnp.sum(out**2) for out in connect(p, x, y))))(params)
    for leaf in jax.tree.leaves(gradient):
        assert np.all(np.isfinite(leaf))
        assert np.any(leaf)


def test_every_stream_starts_as_the_embedding():
    x = values((B, T, D)).astype(jnp.bfloat16)
    tiled = hyper_connection.tile(x, STREAMS)
    assert tiled.dtype == jnp.float32
    wide = np.tile(np.asarray(x, np.float32), (1, 1, STREAMS))
    assert np.array_equal(tiled.reshape(B, T, STREAMS * D), wide)
