"""Guidance through the whole model: self-replay, drift, some layers only, padding, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small_model
from tests.small_model import CFG, EVERYTHING, SITE_LAYERS, masters
from trace_jax.formats import e2m1
from trace_jax.guidance import policy, quantizer, record
from trace_jax.guidance.record import Guidance, LayerGuide
from trace_jax.models import decoder
from trace_jax.models.layer_context import LayerContext

TOKENS = small_model.tokens()
ENCODINGS = ("codes", "low1", "low2", "syndrome6")
recording = functools.partial(
    record.recording, patterns=("*",), share="all", site_layers=SITE_LAYERS, quantized=EVERYTHING
)
CODES = recording("codes")


# In bfloat16 by the program that users run: there the last bits tell.
FORWARD = {"bfloat16": small_model.forward, "float32": small_model.quick_forward}


@functools.cache
def recorded(dtype):
    """A rollout-like forward that keeps its rounding in every encoding."""
    out = FORWARD[dtype](
        masters(), TOKENS, CFG, policy=EVERYTHING, dtype=jnp.dtype(dtype),
        records=tuple(recording(encoding) for encoding in ENCODINGS),
    )  # fmt: skip
    return out, dict(zip(ENCODINGS, out.recorded, strict=True))


def replay(params, dtype, guidance, routes):
    return FORWARD[dtype](
        params, TOKENS, CFG, policy=EVERYTHING, dtype=jnp.dtype(dtype),
        guidance=guidance, routes_LBTA=routes, records=(CODES,),
    )  # fmt: skip


def differing(ours, other):
    """Share of codes that differ, by site."""
    return {
        site: float(np.mean(np.asarray(codes(guide)) != np.asarray(codes(other.guides[site]))))
        for site, guide in ours.guides.items()
    }


def codes(guide):
    """Codes [L, B, T, ...] of a Guide that keeps them in full."""
    return e2m1.unpack_bits(guide.bits, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_self_replay_changes_no_code_at_any_site(encoding, dtype):
    out, guidance = recorded(dtype)
    again = replay(masters(), dtype, guidance[encoding], out.routes_LBTA)
    assert set(again.recorded[0].guides) == set(EVERYTHING.sites)
    for ours, rollout in zip(
        *map(jax.tree.leaves, (again.recorded[0], guidance["codes"])), strict=True
    ):
        assert np.array_equal(ours, rollout)  # bits, block scales and outer scales
    assert np.array_equal(again.logits, out.logits)
    assert np.array_equal(again.routes_LBTA, out.routes_LBTA)


@pytest.mark.parametrize("name", ["mxfp4_w4a8", "nvfp4_4over6"])
def test_self_replay_in_other_formats(name):
    quantized = policy.resolve([("*", name)], small_model.SITES)
    records = tuple(
        record.recording(encoding, ("*",), "all", SITE_LAYERS, quantized)
        for encoding in ("codes", "low1")
    )
    run = functools.partial(
        small_model.forward, masters(), TOKENS, CFG,
        policy=quantized, dtype=jnp.dtype("bfloat16"), records=records,
    )  # fmt: skip
    out = run()
    again = run(guidance=out.recorded[1], routes_LBTA=out.routes_LBTA)
    assert {guide.fmt for guide in out.recorded[0].guides.values()} == (
        {"mxfp4", "mxfp8"} if name == "mxfp4_w4a8" else {name}
    )
    for ours, rollout in zip(*map(jax.tree.leaves, (again.recorded, out.recorded)), strict=True):
        assert np.array_equal(ours, rollout)  # bits, block scales and outer scales
    assert np.array_equal(again.logits, out.logits)


def test_guidance_brings_drifted_activations_back_to_the_rollouts_codes():
    """The rollout in bfloat16, training in float32: the drift of real engines."""
    out, guidance = recorded("bfloat16")
    unguided = recorded("float32")[1]["codes"]
    nearest = differing(unguided, guidance["codes"])
    assert min(nearest.values()) > 0.01
    for encoding in ENCODINGS:
        guided = replay(masters(), "float32", guidance[encoding], out.routes_LBTA)
        assert max(differing(guided.recorded[0], guidance["codes"]).values()) == 0


def test_latter_half_keeps_those_layers_and_leaves_the_others_to_nearest():
    """The layers before are those of an unguided forward; the layers after follow the record."""
    out, guidance = recorded("bfloat16")
    half = Guidance(
        jax.tree.map(lambda a: a[1:2], guidance["low1"].guides),
        tuple((site, (1,)) for site, _ in guidance["low1"].layers),
    )
    guided = replay(masters(), "float32", half, out.routes_LBTA).recorded[0]
    unguided = recorded("float32")[1]["codes"]
    for site in set(EVERYTHING.sites) - {"experts/mid"}:  # whose rows follow the replayed routes
        ours, nearest, rollout = (
            np.asarray(codes(g.guides[site])) for g in (guided, unguided, guidance["codes"])
        )
        assert np.array_equal(ours[0], nearest[0])
        # What comes in from the unguided half is too far off for a low bit to repair all of it.
        assert np.mean(nearest[1] != rollout[1]) > 0.05
        assert np.mean(ours[1] != rollout[1]) < np.mean(nearest[1] != rollout[1]) / 2


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_choosing_the_layer_at_run_time_equals_choosing_it_at_trace_time(encoding):
    """`guided` as a traced value takes one branch or the other, codes and gradient alike."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 64))
    rollout_x = x * (1 + 0.02 * jax.random.normal(jax.random.key(1), x.shape))
    guide = quantizer.encode(quantizer.round_value(rollout_x, "nvfp4", "row", None), encoding)

    @jax.jit
    def quantize(x, guided):
        guides = {"experts/in": LayerGuide(guide, guided)}
        context = LayerContext(EVERYTHING, jnp.bfloat16, guides)
        value = lambda x: block_value(context.quantize("experts/in", x)[0])
        y, pullback = jax.vjp(value, x)
        return context.quantize("experts/in", x)[1], y, pullback(jnp.ones_like(y))[0]

    def block_value(operand):
        return operand.values.astype(jnp.float32) * operand.outer[..., None]

    at_trace_time = jax.jit(
        lambda x: LayerContext(
            EVERYTHING, jnp.bfloat16, {"experts/in": LayerGuide(guide, True)}
        ).quantize("experts/in", x)
    )
    guided, nearest = quantize(x, True), quantize(x, False)
    operand, q = at_trace_time(x)
    assert jax.tree.all(jax.tree.map(np.array_equal, guided[:2], (q, block_value(operand))))
    assert not np.array_equal(guided[0].codes, nearest[0].codes)
    plain = quantizer.round_value(x, "nvfp4", "row", None)
    assert jax.tree.all(jax.tree.map(np.array_equal, nearest[0], plain))
    for result in (guided, nearest):
        np.testing.assert_allclose(result[2], 1, rtol=1e-2)  # straight through, in bfloat16


def test_all_zero_padding_of_the_record_keeps_gradients_finite():
    """Tokens without a record: all bytes zero. They decode to zeros and receive no gradient."""
    out, guidance = recorded("bfloat16")
    cut = jax.tree.map(lambda a: a.at[:, :, 4:].set(jnp.zeros((), a.dtype)), guidance["low1"])
    mask_T = (jnp.arange(TOKENS.shape[1]) < 4).astype(jnp.float32)

    @functools.partial(jax.jit, compiler_options=small_model.UNOPTIMIZED)
    def value_and_grad(params, guidance):
        def loss(params):
            logits = decoder.forward(
                params, TOKENS, CFG, policy=EVERYTHING, dtype=jnp.bfloat16,
                guidance=guidance, routes_LBTA=out.routes_LBTA,
            ).logits  # fmt: skip
            return jnp.sum(jnp.sin(logits) * mask_T[:, None])

        return jax.value_and_grad(loss)(params)

    value, grads = value_and_grad(masters(), cut)
    whole, whole_grads = value_and_grad(masters(), guidance["low1"])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
    # Padding comes after the tokens of the loss, so it takes no part in value or gradient.
    assert value == whole
    for ours, expected in zip(*map(jax.tree.leaves, (grads, whole_grads)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    assert np.max(np.abs(grads["layers_0"]["0"]["experts"]["router"])) > 0


def test_hidden_rows_cannot_be_guided_without_the_routes_they_belong_to():
    _, guidance = recorded("float32")
    with pytest.raises(ValueError, match=r"'experts/mid'.*routes_LBTA"):
        decoder.forward(masters(), TOKENS, CFG, policy=EVERYTHING, guidance=guidance["codes"])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bytes_per_token_are_those_of_the_formula(encoding):
    """width * (b + 8/16) / 8 a site and layer, 4 bytes for each outer scale (method.md 1.11).

    Of syndrome6, rows of 32 keep 14 checks and 2 scale parities (a byte a block), the row of 128
    keeps 48 and 8.
    """
    _, guidance = recorded("float32")
    heads = CFG.num_heads * CFG.head_dim
    kv, mid = CFG.num_kv_heads * CFG.head_dim, CFG.num_experts_per_token * CFG.moe_intermediate_size
    width = 2 * CFG.hidden_size + heads + 2 * kv + mid
    rows = 3 + 2 * CFG.num_kv_heads + CFG.num_experts_per_token  # each with an outer scale
    bits = {"codes": 4, "low1": 1, "low2": 2}
    if encoding == "syndrome6":
        bytes_of_rows = (rows - 1) * 2 + 7
    else:
        bytes_of_rows = width * (bits[encoding] + 8 / 16) / 8
    expected = CFG.num_layers * (bytes_of_rows + 4 * rows)
    assert record.bytes_per_token(guidance[encoding]) == expected
