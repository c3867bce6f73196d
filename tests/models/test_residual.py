"""Residual compensation against plain numpy: x ~ Q(x) + Q(x - Q(x)), two products of one weight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.formats import oracle
from tests.models.test_experts import A, B, D, F, T, mixture, weights_of
from tests.small_model import EVERYTHING
from trace_jax.formats import block_scaled
from trace_jax.formats.block_scaled import Operand
from trace_jax.guidance import policy, quantizer
from trace_jax.kernels.matmul import matmul
from trace_jax.models.layer_context import LayerContext

HALF = dataclasses.replace(EVERYTHING, residual=0.5)
BF16 = jnp.dtype("bfloat16")
WIDTH, ROWS = 96, 24


def heavy_tailed(shape, seed=0):
    """Activations with outliers, where a block scale leaves much behind."""
    return np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)


def parts(x, fmt="nvfp4", share=0.5):
    """(Q(x), Q(r)) as the oracle has them: r on the channels of each row that keep most of it."""
    first = oracle.quantize(x, fmt)
    left = x - first.values
    kept = round(share * x.shape[-1])
    order = np.argsort(-np.abs(left), axis=-1, kind="stable")[..., :kept]
    chosen = np.zeros_like(left)
    np.put_along_axis(chosen, order, np.take_along_axis(left, order, -1), -1)
    return first, oracle.quantize(chosen, fmt)


def compensated(x, **arguments):
    """What a product of x comes to be, float64: the sum of both values."""
    return sum(np.float64(q.values) for q in parts(x, **arguments))


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_4over6", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_codes_are_those_of_the_oracle(fmt, share):
    x = heavy_tailed((ROWS, WIDTH))
    q = jax.jit(quantizer.round_value, static_argnums=(1, 2, 3))(x, fmt, "row", None)
    left = jax.jit(quantizer.residual, static_argnums=2)(x, q, share)
    first, second = parts(x, fmt, share)
    oracle.assert_same(q, first)
    # JAX 0.10 on CPU fuses x - code * scale into one rounding, across the barrier: the last bit.
    ours = oracle.read(left)
    if second.outer is not None:
        np.testing.assert_allclose(ours.outer, second.outer, rtol=1e-6)
    assert (ours.scales != second.scales).mean() <= 2e-3
    assert (ours.codes != second.codes).mean() <= 2e-3


def test_a_product_is_that_of_both_parts():
    x, w = heavy_tailed((2, ROWS, WIDTH)), heavy_tailed((40, WIDTH), 1)
    operand, q = LayerContext(HALF, BF16).quantize("attention/in", jnp.asarray(x))
    y = matmul(operand, Operand(jnp.asarray(w, BF16), None))
    w = np.float64(jnp.asarray(w, BF16))
    np.testing.assert_allclose(y, compensated(x) @ w.T, rtol=1e-5, atol=1e-4)
    plain, same = LayerContext(EVERYTHING, BF16).quantize("attention/in", jnp.asarray(x))
    assert plain.residual is None
    assert jax.tree.all(jax.tree.map(np.array_equal, q, same))  # recorded: the codes of Q(x)
    error = lambda values: np.linalg.norm(values - x)
    assert error(compensated(x)) < 0.5 * error(np.float64(block_scaled.dequantize(q)))


def test_a_row_does_not_depend_on_its_call():
    x = jnp.asarray(heavy_tailed((ROWS, WIDTH)))
    run = jax.jit(lambda x: LayerContext(HALF, BF16).quantize("experts/in", x)[0])
    whole, one = run(x), run(x[3:4])
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a[3:4], b), whole, one))


def test_the_gradient_is_straight_through_once():
    """d (x w) / d x is w, not what two products of x would give."""
    x, w = jnp.asarray(heavy_tailed((3, WIDTH))), jnp.asarray(heavy_tailed((5, WIDTH), 1))
    quantize = lambda x: LayerContext(HALF, jnp.dtype("float32")).quantize("attention/in", x)[0]
    assert quantize(x).residual is not None
    gradient = jax.grad(lambda x: jnp.sum(matmul(quantize(x), Operand(w, None))))(x)
    np.testing.assert_allclose(
        gradient, np.broadcast_to(np.sum(w, axis=0), x.shape), rtol=1e-4, atol=1e-4
    )


def test_only_what_multiplies_a_weight_is_compensated():
    assert [site for site in policy.SITES if not HALF.residual_share(site)] == [
        "attention/k", "attention/v", "delta_net/state",
    ]  # fmt: skip
    assert not any(map(EVERYTHING.residual_share, policy.SITES))
    kv = jnp.asarray(heavy_tailed((2, 3, 2, 32)))
    assert LayerContext(HALF, BF16).quantize("attention/k", kv)[0].residual is None
    assert HALF.only(weights=True, sites=("experts/in",)).residual == 0.5


def test_the_experts_take_both_parts_of_their_input_and_of_their_hidden_rows():
    x = heavy_tailed((B, T, D), 2)
    chosen = np.array([[[0, 1], [1, 2], [3, 0], [2, 1], [0, 3]]] * B)
    weight = jnp.full((B, T, A), 0.5)
    operand, _ = LayerContext(HALF, jnp.float32).quantize("experts/in", jnp.asarray(x))
    y, q_mid = mixture(HALF, operand, chosen, weight, weights_of())
    gate_up, down = (np.float64(matrices.values) for matrices in weights_of())
    x, expected = compensated(x), np.zeros((B, T, D))
    flipped = 0
    for b, t, a in np.ndindex(B, T, A):
        hidden = gate_up[chosen[b, t, a]] @ x[b, t]
        gate, up = hidden[:F], hidden[F:]
        mid = np.float32(gate / (1 + np.exp(-gate)) * up)
        expected[b, t] += 0.5 * (down[chosen[b, t, a]] @ compensated(mid))
        flipped += np.sum(oracle.quantize(mid, "nvfp4").codes != oracle.read(q_mid).codes[b, t, a])
    assert flipped == 0  # else the comparison is of other codes
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-2)
