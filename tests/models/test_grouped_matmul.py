"""The grouped product against a dense loop, forward and backward, at every kind of routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.formats.block_scaled import Operand
from trace_jax.kernels import grouped_matmul as grouped

N, A, E, D, F = 24, 2, 5, 8, 6


def random_routes(seed):
    """Two different experts for each token."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(E)[:A] for _ in range(N)])


ROUTES = {
    "random": random_routes(0),
    "one pair of experts takes all": np.tile([[3, 1]], (N, 1)),
    "one expert named twice": np.full((N, A), 2),
    "first and last only": np.tile([[0, E - 1]], (N, 1)),
    "one token apart from the rest": np.array([[4, 0]] + [[1, 2]] * (N - 1)),
}
every_routing = pytest.mark.parametrize("expert_NA", ROUTES.values(), ids=ROUTES)


def operands(dtype=jnp.float32, seed=1):
    draw = lambda i, shape: jax.random.normal(jax.random.key(seed + i), shape)
    x = Operand(draw(0, (N, D)).astype(dtype), jnp.exp(draw(1, (N,))))
    w = Operand(draw(2, (E, F, D)).astype(dtype), jnp.exp(draw(3, (E,))))
    return x, w


@jax.jit
def product(x, w, expert_NA):
    """[N, A, F]: each token times the matrices of its experts."""
    plan = grouped.dispatch_plan(expert_NA, w.values.shape[0])
    spread = lambda a: grouped.to_blocks(
        jnp.broadcast_to(a[:, None], (*expert_NA.shape, *a.shape[1:])), plan
    )
    return grouped.from_blocks(grouped.grouped_matmul(jax.tree.map(spread, x), w, plan), plan)


def dense(x, w, expert_NA):
    """The same, a plain loop in numpy float64."""
    x, w = ([None if a is None else np.float64(a) for a in operand] for operand in (x, w))
    rows = x[0] if x[1] is None else x[0] * x[1][:, None]
    matrices = w[0] if w[1] is None else w[0] * w[1][:, None, None]
    pairs = zip(rows, expert_NA, strict=True)
    return np.stack([[matrices[e] @ row for e in chosen] for row, chosen in pairs])


@every_routing
def test_equals_the_dense_loop(expert_NA):
    x, w = operands()
    np.testing.assert_allclose(product(x, w, expert_NA), dense(x, w, expert_NA), 1e-5, 1e-5)


def test_without_outer_scales():
    x, w = (Operand(operand.values, None) for operand in operands())
    routes = ROUTES["random"]
    np.testing.assert_allclose(product(x, w, routes), dense(x, w, routes), 1e-5, 1e-5)


def test_bfloat16_operands_are_summed_in_float32():
    x, w = operands(jnp.bfloat16)
    y = product(x, w, ROUTES["random"])
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, dense(x, w, ROUTES["random"]), 1e-5, 1e-5)


@every_routing
def test_gradients_equal_those_of_the_dense_product(expert_NA):
    x, w = operands()
    dy_NAF = jax.random.normal(jax.random.key(9), (N, A, F))

    def plain(x, w, expert_NA):
        y = jnp.einsum("ND,NAFD->NAF", x.values, w.values[expert_NA])
        return y * x.outer[:, None, None] * w.outer[expert_NA][..., None]

    grads = [gradients(function, x, w, expert_NA, dy_NAF) for function in (product, plain)]
    for ours, expected in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@functools.partial(jax.jit, static_argnums=0)
def gradients(function, x, w, expert_NA, dy_NAF):
    return jax.grad(lambda x, w: jnp.sum(function(x, w, expert_NA) * dy_NAF), argnums=(0, 1))(x, w)


def test_bfloat16_weight_gradient_is_accumulated_in_float32():
    # 4096 rows of 1 in one expert: a running bfloat16 sum would stop at 256.
    rows = 4096
    x = jnp.ones((rows, 16), jnp.bfloat16)
    w = jnp.ones((1, 16, 16), jnp.bfloat16)
    loss = lambda w: jnp.sum(product(Operand(x, None), Operand(w, None), jnp.zeros((rows, 1), int)))
    assert np.array_equal(np.float32(jax.grad(loss)(w)), np.full((1, 16, 16), rows, np.float32))


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 1, 1), (3, 7, 7), (50, 2, 4)])
def test_dispatch_gives_every_choice_its_own_row_of_its_own_expert(tokens, choices, experts):
    """Down to one token, and where every token takes every expert."""
    rng = np.random.default_rng(tokens)
    expert_NA = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)])
    plan = grouped.dispatch_plan(expert_NA, experts)
    slots = np.asarray(plan.slot_NA).reshape(-1)
    assert len(set(slots)) == tokens * choices
    assert slots.min() >= 0
    assert slots.max() < plan.expert_b.size * plan.rows
    assert np.array_equal(np.asarray(plan.expert_b)[slots // plan.rows], expert_NA.reshape(-1))


def test_work_grows_with_tokens_not_with_experts():
    """128 experts and 8 choices: at most one block an expert beyond the rows routed."""
    plan = grouped.dispatch_plan(jnp.zeros((1024, 8), jnp.int32), 128)
    assert plan.rows == 64
    assert plan.expert_b.size * plan.rows <= 1024 * 8 + 128 * 64


def test_blocks_round_trip_and_unowned_rows_are_zero():
    plan = grouped.dispatch_plan(jnp.asarray(ROUTES["random"]), E)
    rows_NAD = jax.random.normal(jax.random.key(0), (N, A, D))
    blocks = grouped.to_blocks(rows_NAD, plan)
    assert np.array_equal(grouped.from_blocks(blocks, plan), rows_NAD)
    assert np.count_nonzero(np.any(np.asarray(blocks) != 0, axis=-1)) == N * A
