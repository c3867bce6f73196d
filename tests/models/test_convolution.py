"""The causal convolution: taps, what it keeps, and that calls join without a seam."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from trace_jax.models.convolution import causal_convolution

B, T, N = 2, 11, 3


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def start(width, dilation=1, batch=B, channels=N):
    """The tail ahead of a sequence."""
    return jnp.zeros((batch, (width - 1) * dilation, channels))


def oracle(x_BTN, w_NW, dilation):
    """One product at a time, float64; zeros before the start."""
    y_BTN, width = np.zeros(x_BTN.shape), w_NW.shape[1]
    for b, t, n, i in np.ndindex(*x_BTN.shape, width):
        earlier = t - (width - 1 - i) * dilation
        if earlier >= 0:
            y_BTN[b, t, n] += np.float64(w_NW[n, i]) * x_BTN[b, earlier, n]
    return y_BTN


def test_the_last_tap_multiplies_the_current_token():
    digits_BTN = jnp.arange(1.0, 6)[None, :, None]
    taps_NW = jnp.array([[1000.0, 100, 10, 1]])
    y, tail = causal_convolution(digits_BTN, taps_NW, start(4, 1, 1, 1), None)
    assert y[0, :, 0].tolist() == [1, 12, 123, 1234, 2345]
    assert tail[0, :, 0].tolist() == [3, 4, 5]
    y, tail = causal_convolution(digits_BTN, taps_NW, start(4, 2, 1, 1), None, dilation=2)
    assert y[0, :, 0].tolist() == [1, 2, 13, 24, 135]
    assert tail[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("width", "dilation"), [(4, 1), (4, 3), (2, 5), (1, 1)])
def test_it_equals_the_sum_of_products(width, dilation):
    x_BTN, w_NW = draw(B, T, N), draw(N, width, seed=1)
    y_BTN, tail_BPN = causal_convolution(x_BTN, w_NW, start(width, dilation), None, dilation)
    assert y_BTN.dtype == tail_BPN.dtype == jnp.float32
    assert tail_BPN.shape == (B, (width - 1) * dilation, N)
    np.testing.assert_allclose(y_BTN, oracle(x_BTN, w_NW, dilation), atol=2e-6)


@pytest.mark.parametrize("dilation", [1, 3])
def test_padded_prompts_and_single_tokens_continue_without_a_seam(dilation):
    x_BTN, w_NW = draw(B, T, N), draw(N, 4, seed=1)
    whole, whole_tail = causal_convolution(x_BTN, w_NW, start(4, dilation), None, dilation)
    lengths_B = np.array([5, 1])  # the second is shorter than what the taps reach
    prompt_BTN = np.where(np.arange(7)[:, None] < lengths_B[:, None, None], x_BTN[:, :7], np.nan)
    y, tail_BPN = causal_convolution(prompt_BTN, w_NW, start(4, dilation), lengths_B, dilation)
    for b, length in enumerate(lengths_B):
        assert np.array_equal(y[b, :length], whole[b, :length])
    step = jax.jit(causal_convolution, static_argnames="dilation")
    at = lengths_B.copy()
    while np.any(at < T):
        token_B1N = np.stack([x_BTN[b, [min(at[b], T - 1)]] for b in range(B)])
        real_B = (at < T).astype(np.int32)  # a sequence that has ended adds nothing
        y, tail_BPN = step(token_B1N, w_NW, tail_BPN, real_B, dilation=dilation)
        for b in np.flatnonzero(real_B):
            np.testing.assert_allclose(y[b, 0], whole[b, at[b]], atol=1e-6)
        at += real_B
    assert np.array_equal(tail_BPN, whole_tail)


def test_gradients_of_input_filters_and_tail():
    arguments = draw(B, 5, N), draw(N, 3, seed=1), draw(B, 4, N, seed=2)
    function = lambda x, w, tail: causal_convolution(x, w, tail, jnp.array([5, 2]), dilation=2)
    check_grads(function, arguments, order=1, modes=["rev"], rtol=1e-2)


def test_bad_shapes_say_what_fits():
    x_BTN, w_NW = draw(B, T, N), draw(N, 4)
    with pytest.raises(ValueError, match=r"w\(4, 4\): x\(2, 11, 3\) has 3 channels"):
        causal_convolution(x_BTN, draw(4, 4), start(4), None)
    with pytest.raises(ValueError, match=r"4 taps, dilation 3, .* read 9 earlier .*\(2, 9, 3\)"):
        causal_convolution(x_BTN, w_NW, draw(B, 3, N), None, dilation=3)
