"""Routing: top-k, weights, replay and its gradient; the mixture against a loop over experts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.small_model import CFG, EVERYTHING
from trace_jax.formats.block_scaled import Operand
from trace_jax.guidance.policy import NOTHING
from trace_jax.models import experts
from trace_jax.models.layer_context import LayerContext
from trace_jax.parallel import mesh as meshes

B, T, E, A = 2, 5, CFG.num_experts, CFG.num_experts_per_token
D, F = CFG.hidden_size, CFG.moe_intermediate_size
LOGITS = jax.random.normal(jax.random.key(0), (B, T, E))


def test_top_k_of_the_softmax_renormalised():
    chosen, weight, own = experts.route(LOGITS, None, CFG)
    probability = np.exp(np.float64(LOGITS))
    probability /= probability.sum(-1, keepdims=True)
    expected = np.argsort(-probability, axis=-1)[..., :A]
    top = np.take_along_axis(probability, expected, -1)
    assert np.array_equal(chosen, expected)
    assert np.array_equal(own, expected)
    np.testing.assert_allclose(weight, top / top.sum(-1, keepdims=True), rtol=1e-6)


def test_plain_probabilities_where_the_model_does_not_renormalise():
    cfg = dataclasses.replace(CFG, norm_topk_prob=False)
    chosen, weight, _ = experts.route(LOGITS, None, cfg)
    expected = np.take_along_axis(np.asarray(jax.nn.softmax(LOGITS)), np.asarray(chosen), -1)
    np.testing.assert_allclose(weight, expected, rtol=1e-6)


def test_ties_go_to_the_lower_expert():
    chosen, weight, _ = experts.route(jnp.zeros((1, 1, E)), None, CFG)
    assert chosen.tolist() == [[[0, 1]]]
    assert weight.tolist() == [[[0.5, 0.5]]]


def test_replay_takes_the_rollouts_experts_and_keeps_the_routers_gradient():
    replayed = (jnp.argsort(LOGITS, axis=-1)[..., :A]).astype(jnp.uint8)  # the least likely ones

    def weights(logits):
        return experts.route(logits, replayed, CFG)[1]

    chosen, weight, own = experts.route(LOGITS, replayed, CFG)
    assert np.array_equal(chosen, replayed)
    assert np.array_equal(own, experts.route(LOGITS, None, CFG)[0])
    among_chosen = jax.nn.softmax(jnp.take_along_axis(LOGITS, chosen, axis=-1))
    np.testing.assert_allclose(weight, among_chosen, rtol=1e-6)

    # d w_0 / d logit = w_0 (1 - w_0) and -w_0 w_1 at the chosen, nothing at the others.
    gradient = jax.grad(lambda logits: jnp.sum(weights(logits)[..., 0]))(LOGITS)
    slope = weight[..., 0] * weight[..., 1]
    expected = np.zeros((B, T, E), np.float32)
    np.put_along_axis(expected, np.asarray(chosen), np.stack([slope, -slope], -1), -1)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_a_replayed_id_below_zero_leaves_the_choice_to_the_router():
    own = experts.route(LOGITS, None, CFG)
    for found, expected in zip(
        experts.route(LOGITS, jnp.full((B, T, A), -1), CFG), own, strict=True
    ):
        assert np.array_equal(found, expected)
    first = jnp.where(jnp.arange(T)[:, None] == 0, jnp.int32(3), -1) * jnp.ones(
        (B, T, A), jnp.int32
    )
    chosen = experts.route(LOGITS, first, CFG)[0]
    assert np.all(chosen[:, 0] == 3)
    assert np.array_equal(chosen[:, 1:], own[0][:, 1:])


def test_replayed_experts_that_this_router_gives_no_chance_stay_finite():
    """Their probabilities underflow to 0; the weights still sum to 1 and have a gradient."""
    logits = jnp.array([[[300.0, 200.0, 1.0, 0.0]]])
    replayed = jnp.array([[[2, 3]]])
    weights = lambda logits: experts.route(logits, replayed, CFG)[1]
    np.testing.assert_allclose(weights(logits)[0, 0], jax.nn.softmax(jnp.array([1.0, 0.0])), 1e-6)
    assert np.all(np.isfinite(jax.grad(lambda logits: weights(logits)[0, 0, 0])(logits)))


@functools.cache
def weights_of(seed=3):
    draw = lambda i, shape: jax.random.normal(jax.random.key(seed + i), shape)
    return Operand(draw(0, (E, 2 * F, D)), None), Operand(draw(1, (E, D, F)), None)


@functools.partial(jax.jit, static_argnums=0)
def mixture(policy, x_BT, chosen_BTA, weight_BTA, weights):
    context = LayerContext(policy, jnp.float32)
    return experts.expert_mixture(context, x_BT, chosen_BTA, weight_BTA, None, *weights)


@pytest.mark.parametrize(
    "chosen",
    [
        np.array([[[0, 1], [1, 2], [3, 0], [2, 1], [0, 3]]] * B),
        np.full((B, T, A), [3, 0]),  # experts 1 and 2 get nothing
    ],
    ids=["spread", "two experts take all"],
)
def test_mixture_equals_a_loop_over_tokens(chosen):
    x = jax.random.normal(jax.random.key(1), (B, T, D))
    weight = jax.nn.softmax(jax.random.normal(jax.random.key(2), (B, T, A)))
    y, quantized = mixture(NOTHING, Operand(x, None), chosen, weight, weights_of())
    assert quantized is None
    gate_up, down = (np.float64(operand.values) for operand in weights_of())
    expected = np.zeros((B, T, D))
    for b, t, a in np.ndindex(B, T, A):
        hidden = gate_up[chosen[b, t, a]] @ np.float64(x[b, t])
        gate, up = hidden[:F], hidden[F:]
        mid = gate / (1 + np.exp(-gate)) * up
        expected[b, t] += weight[b, t, a] * (down[chosen[b, t, a]] @ mid)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)


def test_hidden_rows_are_recorded_in_the_order_of_the_choices():
    """Naming a token's experts in another order permutes its rows, and nothing else."""
    x = Operand(jax.random.normal(jax.random.key(1), (B, T, D)), None)
    every = np.broadcast_to(np.arange(E), (B, T, E))
    chosen = jnp.asarray(np.random.default_rng(0).permuted(every, axis=-1)[..., :A])
    weight = jnp.full((B, T, A), 0.5)
    y, q = mixture(EVERYTHING, x, chosen, weight, weights_of())
    swapped_y, swapped = mixture(EVERYTHING, x, chosen[..., ::-1], weight, weights_of())
    assert q.shape == (B, T, A, F)
    for rows, other in zip(*map(jax.tree.leaves, (q, swapped)), strict=True):
        assert np.array_equal(rows, other[:, :, ::-1])
    np.testing.assert_allclose(y, swapped_y, rtol=1e-6, atol=1e-6)


def test_tokens_travel_and_experts_stay():
    """All tokens on one expert's device at worst; no expert matrix is gathered, none dropped."""
    mesh = meshes.make_mesh({"data": 2, "expert": 4})
    many, few = 8, T
    x = jax.random.normal(jax.random.key(1), (many, few, D))
    weight = jax.nn.softmax(jax.random.normal(jax.random.key(2), (many, few, A)))
    spread = jnp.argsort(jax.random.normal(jax.random.key(4), (many, few, E)))[..., :A]
    context = LayerContext(EVERYTHING, jnp.float32)

    def value(parallel, x, chosen, weight, weights):
        function = experts.expert_mixture_of_group if parallel else experts.expert_mixture
        spec = P("expert") if parallel else P()
        y, q = meshes.over_batch(
            functools.partial(function, context),
            Operand(x, None), chosen, weight, None, whole=weights, whole_spec=spec,
        )  # fmt: skip
        return jnp.sum(jnp.sin(y)), (y, q)

    both = jax.jit(jax.value_and_grad(value, (1, 3, 4), has_aux=True), static_argnums=0)
    with jax.set_mesh(mesh):
        place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
        shared = place(weights_of(), P("expert"))
        rows = place((x, spread, weight), P(meshes.BATCH))
        program = both.lower(True, *rows, shared).compile()
    gathered = re.findall(r"= \S*?\[([\d,]*)\]\S* all-gather", program.as_text())
    assert gathered  # the tokens
    assert not {f"{E},{2 * F},{D}", f"{E},{D},{F}"} & set(gathered)
    for chosen in (spread, jnp.full_like(spread, 2).at[..., 1].set(3), jnp.full_like(spread, 0)):
        (_, (y, q)), grads = program(rows[0], place(chosen, P(meshes.BATCH)), rows[2], shared)
        (_, (one_y, one_q)), one_grads = both(False, x, chosen, weight, weights_of())
        np.testing.assert_allclose(y, one_y, rtol=1e-5, atol=1e-4)
        assert np.array_equal(q.codes, one_q.codes)
        for ours, theirs in zip(*map(jax.tree.leaves, (grads, one_grads)), strict=True):
            # float32 sums in another order, against the largest of the array's sums
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * np.abs(theirs).max())
