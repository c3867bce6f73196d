"""The KV cache: token-by-token decode equals the teacher-forced forward; every row in its place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small_model
from tests.small_model import CFG, EVERYTHING, SITE_LAYERS, SITES, masters, quick_forward
from trace_jax.formats import bits, block_scaled
from trace_jax.formats import quantize as formats
from trace_jax.guidance import policy, record
from trace_jax.guidance.policy import NOTHING
from trace_jax.models import cache, decoder

TOKENS = small_model.tokens()
B, T = TOKENS.shape
# Not attention/out: a mean of V values that are all 6 * 2^e comes out an ulp above or below, and
# there MXFP4 doubles the block scale.
MXFP4, W4A8 = (
    policy.resolve([("attention/out", "bf16"), ("*", fmt)], SITES)
    for fmt in ("mxfp4", "mxfp4_w4a8")
)
DELAY_B = np.array([0, 2])  # the second sequence starts two steps later


@functools.partial(
    jax.jit,
    static_argnames=("policy", "dtype", "records"),
    compiler_options=small_model.UNOPTIMIZED,
)
def decode(params, tokens_BT, policy, dtype, records):
    """Logits [step, B, V] and records [step] of tokens fed one at a time, from an empty cache.

    Each sequence is at a position of its own, step - DELAY_B[b]. Until it starts, its first token
    is fed again and again, as the last one of a finished sequence is in a rollout.
    """
    empty = cache.empty(CFG, policy, B, T, dtype)

    def step(kv, i):
        position_B1 = jnp.clip(i - DELAY_B, 0, T - 1)[:, None]
        token_B1 = jnp.take_along_axis(tokens_BT, position_B1, axis=1)
        out = decoder.forward(
            params, token_B1, CFG, policy=policy, dtype=dtype,
            positions_BT=position_B1, cache=kv, records=records,
        )  # fmt: skip
        return out.cache, (out.logits[:, 0], out.recorded)

    return jax.lax.scan(step, empty, jnp.arange(T + DELAY_B.max()))[1]


@pytest.mark.parametrize(
    "quantized",
    [EVERYTHING, dataclasses.replace(EVERYTHING, residual=0.5), MXFP4, W4A8, NOTHING],
    ids=["nvfp4", "nvfp4, residual", "mxfp4", "mxfp4_w4a8", "plain"],
)
def test_decode_equals_the_teacher_forced_forward(quantized):
    records = ()
    if quantized.sites:
        records = (record.recording("codes", ("*",), "all", SITE_LAYERS, quantized),)
    arguments = dict(policy=quantized, dtype=jnp.dtype("float32"), records=records)
    whole = quick_forward(masters(), TOKENS, CFG, **arguments)
    logits, recorded = decode(masters(), TOKENS, **arguments)
    for b, delay in enumerate(DELAY_B.tolist()):
        np.testing.assert_allclose(logits[delay : delay + T, b], whole.logits[b], atol=2e-5)
        for expected, steps in zip(*map(jax.tree.leaves, (whole.recorded, recorded)), strict=True):
            # [L, B, T, ...] against [step, L, B, 1, ...]
            ours = np.moveaxis(np.asarray(steps)[delay : delay + T, :, b, 0], 0, 1)
            if ours.dtype == np.float32:
                np.testing.assert_allclose(ours, expected[:, b], rtol=1e-5)  # outer scales
            else:
                assert np.array_equal(ours, np.asarray(expected)[:, b])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", None])
def test_rows_are_written_at_their_positions_and_nowhere_else(fmt):
    quantized = NOTHING if fmt is None else policy.resolve([("attention/[kv]", fmt)], SITES)
    dtype = jnp.dtype("bfloat16")
    x = jax.random.normal(jax.random.key(0), (2, B, 1, CFG.num_kv_heads, CFG.head_dim), dtype)
    rows = x if fmt is None else [formats.quantize(a, fmt) for a in x]
    exact = x if fmt is None else [block_scaled.dequantize(q) for q in rows]

    @jax.jit
    def written(rows):
        """What each layer reads after one token of layer 1."""
        before = cache.empty(CFG, quantized, B, 4, dtype)
        after = cache.write(before, jnp.int32(1), jnp.array([[2], [0]]), *rows)
        return [cache.read(after, jnp.int32(layer), dtype) for layer in range(CFG.num_layers)]

    for layer, operands in enumerate(written(rows)):
        for read, wrote in zip(operands, exact, strict=True):
            values = np.float32(read.values)
            if read.outer is not None:
                values = values * np.asarray(read.outer)[..., None]
            expected = np.zeros((B, CFG.num_kv_heads, 4, CFG.head_dim), np.float32)
            if layer == 1:
                expected[0, :, 2], expected[1, :, 0] = np.float32(wrote)[:, 0]
            np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_length_is_the_positions_a_sequence_can_hold():
    assert cache.empty(CFG, EVERYTHING, B, 9, jnp.bfloat16).length == 9


def test_an_fp4_cache_takes_the_bytes_of_fp4():
    size = lambda quantized: sum(
        leaf.nbytes for leaf in jax.tree.leaves(cache.empty(CFG, quantized, 1, 1, jnp.bfloat16))
    )
    values = 2 * CFG.num_layers * CFG.num_kv_heads * CFG.head_dim
    outer = 4 * 2 * CFG.num_layers * CFG.num_kv_heads
    assert size(NOTHING) == 2 * values
    assert size(EVERYTHING) == values * 4.5 / 8 + outer
    assert size(MXFP4) == size(W4A8) == values * 4.25 / 8
    assert size(policy.resolve([("attention/[kv]", "mxfp8")], SITES)) == values * 8.25 / 8


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu", "bfloat16", "float32"])
def test_buffers_hold_every_bit_of_their_values(dtype):
    dtype = jnp.dtype(dtype)
    x = np.arange(256 * dtype.itemsize, dtype=np.uint8).view(dtype)
    held = bits.hold(jnp.asarray(x))
    assert held.dtype == bits.dtype_of(dtype)
    assert np.array_equal(np.asarray(bits.restore(held, dtype)).view(np.uint8), x.view(np.uint8))
    zero = bits.restore(jnp.zeros(3, bits.dtype_of(dtype)), dtype)
    assert np.all(np.abs(np.float32(zero)) <= 2.0**-127)
