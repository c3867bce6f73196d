"""The decoder against plain numpy, padding, causality, and the arguments of its forward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small_model
from tests.models import reference
from tests.small_model import CFG, DEFAULT, EVERYTHING, SITE_LAYERS, masters, quick_forward
from trace_jax.guidance import record
from trace_jax.guidance.policy import NOTHING
from trace_jax.models import cache, decoder
from trace_jax.models.rotary import rope

VARIANTS = {
    "qwen3": CFG,
    "other": dataclasses.replace(
        CFG,
        num_kv_heads=1,
        head_dim=64,
        num_experts_per_token=3,
        rms_norm_eps=1e-2,
        norm_topk_prob=False,
    ),
}


@pytest.mark.parametrize("cfg", VARIANTS.values(), ids=VARIANTS)
def test_equals_the_numpy_reference(cfg):
    tokens_BT = small_model.tokens()
    out = quick_forward(masters(cfg), tokens_BT, cfg)
    params = jax.tree.map(np.float64, masters(cfg))
    expected = [reference.forward(params, np.asarray(row), cfg) for row in tokens_BT]
    logits, routes = map(np.stack, zip(*expected, strict=True))
    assert np.std(logits) > 0.5
    np.testing.assert_allclose(out.logits, logits, atol=1e-5)
    assert np.array_equal(np.sort(out.routes_LBTA), np.sort(routes.swapaxes(0, 1)))


def test_logits_of_the_last_real_token_are_those_of_the_whole_sequence():
    tokens_BT, length_B = small_model.tokens(), jnp.array([1, 6])
    whole = quick_forward(masters(), tokens_BT, CFG).logits
    one = quick_forward(masters(), tokens_BT, CFG, length_B=length_B).logits
    np.testing.assert_allclose(one, whole[jnp.arange(2), length_B - 1], atol=1e-6)


@pytest.mark.parametrize("policy", [NOTHING, EVERYTHING], ids=["plain", "fp4"])
def test_what_stands_in_the_padding_changes_no_real_token(policy):
    """Padding takes part in the dispatch to experts, so its rows move those of real tokens."""
    real = small_model.tokens(2, 5)
    logits = [
        quick_forward(masters(), jnp.concatenate([real, padding], 1), CFG, policy=policy).logits[
            :, :5
        ]
        for padding in (jnp.zeros((2, 2), jnp.int32), small_model.tokens(2, 2, seed=5))
    ]
    assert np.array_equal(*logits)


def test_no_gradient_from_a_token_to_later_ones():
    """Every token has its own row of the embedding, so that row's gradient is the token's."""
    length = 6
    tokens_1T = jnp.arange(1, length + 1)[None]

    @functools.partial(jax.jit, compiler_options=small_model.UNOPTIMIZED)
    def gradient_sizes(params, t):
        def loss(params):
            out = decoder.forward(params, tokens_1T, CFG, policy=EVERYTHING)
            return jnp.sum(jnp.sin(out.logits[0, t]))

        return jnp.max(jnp.abs(jax.grad(loss)(params)["embed"]), axis=-1)

    for t in range(length):
        size = np.asarray(gradient_sizes(masters(), t))[1 : length + 1]
        assert np.all(size[: t + 1] > 1e-4)
        assert np.all(size[t + 1 :] == 0)


def test_scores_depend_on_the_distance_of_positions():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 32))

    def score(at, other):
        positions = [jnp.full((1, 1), p) for p in (at, other)]
        q_rotated, k_rotated = (rope(x, p, 1e4, 32) for x, p in zip((q, k), positions, strict=True))
        return jnp.sum(q_rotated * k_rotated)

    np.testing.assert_allclose(score(9, 5), score(104, 100), rtol=1e-4)
    assert abs(score(9, 5) - score(9, 6)) > 1e-3


def test_observed_sites_leave_the_forward_as_it_is():
    """Their codes are recorded, and nothing is rounded: not in the sums, and not in the cache."""
    observing = EVERYTHING.only(weights=False, sites=())
    recording = record.recording("codes", ("*",), "all", SITE_LAYERS, EVERYTHING)
    tokens_BT = small_model.tokens()
    empty = cache.empty(CFG, observing, *tokens_BT.shape, jnp.float32)
    out = quick_forward(
        masters(), tokens_BT, CFG, policy=observing, cache=empty, records=(recording,)
    )
    plain = quick_forward(masters(), tokens_BT, CFG)
    np.testing.assert_allclose(out.logits, plain.logits, atol=1e-5)
    assert set(out.recorded[0].guides) == set(EVERYTHING.sites)


def test_recording_a_site_that_is_not_quantized():
    recording = record.recording("codes", ("*",), "all", SITE_LAYERS, EVERYTHING)
    with pytest.raises(ValueError, match=r"recording .*attention/in.* needs these sites quantized"):
        decoder.forward(masters(), small_model.tokens(), CFG, policy=DEFAULT, records=(recording,))


def test_compute_dtype_defaults_to_that_of_the_embedding():
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), masters())

    def program(**dtype):
        function = lambda params: decoder.forward(params, small_model.tokens(), CFG, **dtype).logits
        return str(jax.make_jaxpr(function)(params))

    assert program() == program(dtype=jnp.bfloat16)
    assert program() != program(dtype=jnp.float32)


@pytest.mark.parametrize("token", [-1, CFG.vocab_size])
def test_a_token_that_the_vocabulary_lacks(token):
    with pytest.raises(ValueError, match=rf"model.vocab_size={CFG.vocab_size} has 0 to"):
        decoder.forward(masters(), jnp.full((1, 2), token), CFG)
