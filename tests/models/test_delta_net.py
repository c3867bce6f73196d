"""Gated DeltaNet against its equations, token by token in numpy float64 (qwen.md 2.4)."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.formats import oracle as fp4
from tests.small_model import UNOPTIMIZED
from trace_jax.formats import block_scaled
from trace_jax.guidance.policy import NOTHING, Policy
from trace_jax.models import delta_net
from trace_jax.models.architecture import DeltaNetConfig, ModelConfig
from trace_jax.models.delta_net import DeltaNet, DeltaState
from trace_jax.models.layer_context import LayerContext

B, T, D, G, H, K, V = 2, 11, 32, 2, 6, 8, 16
WIDTH = 2 * G * K + H * V
CFG = ModelConfig(
    vocab_size=32, hidden_size=D, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16,
    intermediate_size=32, initializer_range=0.25, layer_pattern=("delta_net",),
    delta_net=DeltaNetConfig(G, H, K, V),
)  # fmt: skip
SIGMOID = dataclasses.replace(CFG, delta_net=dataclasses.replace(CFG.delta_net, gate="sigmoid"))
FP4_STATE = Policy((("delta_net/state", "nvfp4"),))
IN_AND_OUT = (("delta_net/in", "nvfp4"), ("delta_net/out", "nvfp4"))
FP4_SITES = Policy(IN_AND_OUT, IN_AND_OUT)


# The oracle.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def unit(x):
    return x / np.sqrt(np.sum(x * x) + 1e-6)


def memory(q, k, v, g, beta, state, wrong=None, hold=lambda s: s):
    """o and the last state. `hold` is what becomes of a state when it is written."""
    q, k, v, g, beta, state = (np.array(x, np.float64) for x in (q, k, v, g, beta, state))
    o, heads, key_heads = np.zeros(v.shape), v.shape[2], q.shape[2]
    for b, h in np.ndindex(len(v), heads):
        j = h % key_heads if wrong == "tiled key heads" else h // (heads // key_heads)
        s = state[b, h]
        for t in range(v.shape[1]):
            query, key = unit(q[b, t, j]), unit(k[b, t, j])
            if wrong != "queries not scaled":
                query = query / np.sqrt(len(query))
            if wrong == "keys not normed":
                key = k[b, t, j]
            decay = np.exp(g[b, t, h])
            before = s
            s = s if wrong == "delta before decay" else decay * s
            u = beta[b, t, h] * (v[b, t, h] - s.T @ key)
            written = s + np.outer(key, u)
            s = decay * written if wrong == "delta before decay" else written
            if beta[b, t, h] or g[b, t, h]:
                s = hold(s)
            o[b, t, h] = (before if wrong == "read before write" else s).T @ query
        state[b, h] = s
    return o, state


def layer(x_BTD, p, cfg, seen_BTD=None):
    """The heads [B, T, H V] of whole sequences, normed and gated; `seen` is x in FP4."""
    seen_BTD = x_BTD if seen_BTD is None else seen_BTD
    mixed, taps = seen_BTD @ p["qkv"].T, p["conv"].shape[1]
    rows = np.concatenate([np.zeros((len(mixed), taps - 1, WIDTH)), mixed], axis=1)
    m = sum(p["conv"][:, i] * rows[:, i : i + mixed.shape[1]] for i in range(taps))
    q, k, v = np.split(m * sigmoid(m), [G * K, 2 * G * K], axis=-1)
    heads = lambda x, count: x.reshape(*x.shape[:2], count, -1)
    g = -np.exp(p["A_log"]) * np.log1p(np.exp(x_BTD @ p["a"].T + p["dt_bias"]))
    beta, zeros = sigmoid(x_BTD @ p["b"].T), np.zeros((len(x_BTD), H, K, V))
    o, _ = memory(heads(q, G), heads(k, G), heads(v, H), g, beta, zeros)
    normed = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + cfg.rms_norm_eps)
    z = heads(seen_BTD @ p["z"].T, H)
    gate = {"silu": z * sigmoid(z), "sigmoid": sigmoid(z)}[cfg.delta_net.gate]
    return (p["norm"]["scale"] * normed * gate).reshape(*x_BTD.shape[:2], -1)


# What the tests share.


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tokens(length, seed=0):
    """q, k, v, g, beta and a state of earlier tokens; decays from 0.2 to 1."""
    x = functools.partial(draw, seed=seed)
    g, beta = -np.exp(x(B, length, H) - 1), sigmoid(draw(B, length, H, seed=seed + 1))
    return (
        x(B, length, G, K), draw(B, length, G, K, seed=seed + 2), x(B, length, H, V), g, beta,
        x(B, H, K, V),
    )  # fmt: skip


@functools.cache
def params():
    """Spread around what a trained layer has; no norm scale is 1."""
    shapes = jax.eval_shape(
        lambda key: DeltaNet(CFG).init(key, jnp.zeros((B, T, D)), context(NOTHING), None, None),
        jax.random.key(0),
    )
    leaves, tree = jax.tree.flatten(nn.unbox(shapes)["params"])
    spread = {(H,): 0.7, (V,): 0.3}  # A_log and dt_bias; the norm
    drawn = [
        spread.get(a.shape, 0.4) * draw(*a.shape, seed=i) + (a.shape == (V,))
        for i, a in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, drawn)


def context(policy):
    return LayerContext(policy, jnp.dtype("float32"))


def _apply(params, x_BTD, before=None, length_B=None, cfg=CFG, policy=NOTHING):
    module = DeltaNet(cfg, name="delta_net")
    return module.apply({"params": params}, x_BTD, context(policy), before, length_B)


quick = functools.partial(jax.jit, compiler_options=UNOPTIMIZED)
apply = quick(_apply, static_argnames=("cfg", "policy"))
recurrent = quick(delta_net.recurrent, static_argnames="fmt")
chunked = quick(delta_net.chunked, static_argnames="chunk")


def close(ours, theirs, atol=2e-6):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)


# The memory.


def test_both_forms_equal_the_equations():
    given = tokens(T)
    for x in given[:2]:
        x[:, 3] *= 1e-3  # so short that the epsilon of their norm counts
    expected = memory(*given)
    close(recurrent(*given), expected)
    for chunk in (1, 4, 64):  # 11 tokens: no padding, a padded last chunk, one short chunk
        close(chunked(*given, chunk=chunk), expected)


def test_two_full_chunks_and_a_rest():
    given = tokens(2 * delta_net.CHUNK + 5)
    close(chunked(*given), memory(*given))


@pytest.mark.parametrize("case", ["one key over and over", "resets"])
def test_chunks_stay_exact_where_they_are_ill_conditioned(case):
    q, k, v, g, beta, state = tokens(delta_net.CHUNK)
    if case == "resets":  # running sums of g of -1000, while some decays are all but 1
        g = np.where(np.arange(delta_net.CHUNK)[:, None] % 3 == 0, -50, g / 100)
    else:
        k, g, beta = np.broadcast_to(k[:, :1], k.shape), np.zeros_like(g), np.ones_like(beta)
    given = q, k, v, np.float32(g), beta, state
    for ours, theirs in zip(chunked(*given), memory(*given), strict=True):
        assert np.max(np.abs(ours - theirs)) < 1e-6 * np.max(np.abs(theirs))


def test_a_call_continues_from_the_state_of_another():
    given = tokens(T)
    early, late = ([x[:, part] for x in given[:5]] for part in (slice(0, 6), slice(6, T)))
    first, state = chunked(*early, given[5], chunk=4)
    second, state = recurrent(*late, state)
    close((np.concatenate([first, second], axis=1), state), memory(*given))


@pytest.mark.parametrize(
    "wrong",
    ["tiled key heads", "queries not scaled", "keys not normed", "delta before decay",
     "read before write"],
)  # fmt: skip
def test_no_other_reading_of_the_equations_passes(wrong):
    given = tokens(T)
    misread = memory(*given, wrong=wrong)[0]
    for form in (recurrent, chunked):
        o_BTHV, _ = form(*given)
        assert np.max(np.abs(o_BTHV - misread)) > 0.1


def test_gradients_are_those_of_the_equations():
    """Each argument's, along one direction, against central differences of the oracle."""
    given = [np.float64(x) for x in tokens(T)]
    weights = draw(B, T, H, V, seed=7), draw(B, H, K, V, seed=8)
    loss = lambda outputs: sum(np.sum(w * x) for w, x in zip(weights, outputs, strict=True))
    directions = [draw(*x.shape, seed=9 + i) for i, x in enumerate(given)]

    def moved(i, by):
        return memory(*(x + by * directions[i] if i == j else x for j, x in enumerate(given)))

    expected = [(loss(moved(i, 1e-6)) - loss(moved(i, -1e-6))) / 2e-6 for i in range(6)]
    for form in (delta_net.recurrent, functools.partial(delta_net.chunked, chunk=4)):

        def ours(*arguments, form=form):
            return sum(jnp.sum(w * x) for w, x in zip(weights, form(*arguments), strict=True))

        found = quick(jax.grad(ours, range(6)))(*map(np.float32, given))
        slopes = [np.sum(a * np.float64(b)) for a, b in zip(found, directions, strict=True)]
        np.testing.assert_allclose(slopes, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_the_inverse_reads_only_below_the_diagonal(size):
    below = np.tril(0.3 * draw(3, size, size), -1)
    exact = np.linalg.inv(np.eye(size) + np.float64(below))
    filled = below + np.triu(draw(3, size, size, seed=1))
    inverse, pull = jax.vjp(jax.jit(delta_net.unit_lower_inverse), filled)
    np.testing.assert_allclose(inverse, exact, atol=1e-6 * np.max(np.abs(exact)))
    d_inverse = draw(3, size, size, seed=2)
    transposed = exact.swapaxes(1, 2)
    expected = np.tril(-transposed @ d_inverse @ transposed, -1)
    scale = np.max(np.abs(expected)) or 1
    np.testing.assert_allclose(pull(d_inverse)[0], expected, atol=2e-6 * scale)


# The state in FP4.


def in_nvfp4(state_KV):
    return fp4.quantize(np.float32(state_KV), "nvfp4").values


def test_a_state_in_fp4_is_rounded_after_each_write_and_read_so():
    given = tokens(T)
    given[3][1, 4:], given[4][1, 4:] = 0, 0  # padding
    # The state that comes in was rounded as well; rounding it again would change it.
    state = in_nvfp4(given[5])
    o_BTHV, after = recurrent(*given[:5], state, fmt="nvfp4")
    close((o_BTHV, after), memory(*given[:5], state, hold=in_nvfp4), atol=1e-5)
    assert not np.allclose(o_BTHV, memory(*given[:5], state)[0], atol=1e-2)
    once = recurrent(*(x[:, :4] for x in given[:5]), state, fmt="nvfp4")[1]
    assert np.array_equal(once[1], after[1])


def test_the_gradient_of_a_state_in_fp4_is_straight_through():
    given, weights = [x[:, :1] for x in tokens(1)[:5]], draw(B, H, K, V, seed=3)
    state = tokens(1)[5]
    after = lambda fmt: lambda *a: jnp.sum(weights * delta_net.recurrent(*a, fmt=fmt)[1])
    slope = lambda fmt: quick(jax.grad(after(fmt), range(1, 6)))(*given, state)
    for rounded, exact in zip(slope("nvfp4"), slope(None), strict=True):
        np.testing.assert_allclose(rounded, exact, rtol=1e-5, atol=1e-6)


def test_training_with_a_state_in_fp4_does_what_decoding_does():
    x_BTD = draw(B, T, D, seed=4)
    whole, after, _ = apply(params(), x_BTD, policy=FP4_STATE)
    state, steps = None, []
    for t in range(T):
        y, state, _ = apply(params(), x_BTD[:, t : t + 1], state, policy=FP4_STATE)
        steps.append(y[:, 0])
    close((np.stack(steps, axis=1), state.state_BHKV), (whole, after.state_BHKV), atol=1e-5)
    held = np.asarray(after.state_BHKV)
    assert len(np.unique(np.abs(held[0, 0, 0]))) <= 8  # the magnitudes of E2M1


# The layer.


@pytest.mark.parametrize("cfg", [CFG, SIGMOID], ids=["silu", "sigmoid"])
def test_the_layer_equals_its_equations(cfg):
    x_BTD = draw(B, T, D, seed=4)
    y_BTD, after, quantized = apply(params(), x_BTD, cfg=cfg)
    exact = jax.tree.map(np.float64, params())
    close([y_BTD], [layer(x_BTD, exact, cfg) @ exact["out"].T], atol=1e-4)
    other = layer(x_BTD, exact, SIGMOID if cfg is CFG else CFG) @ exact["out"].T
    assert np.max(np.abs(y_BTD - other)) > 0.1
    assert after.state_BHKV.shape == (B, H, K, V)
    assert after.tail_BPN.shape == (B, 3, WIDTH)
    np.testing.assert_allclose(after.tail_BPN, x_BTD[:, -3:] @ params()["qkv"].T, atol=1e-5)
    assert set(quantized.values()) == {None}


def test_padding_changes_nothing_and_decoding_continues():
    x_BTD, lengths_B = draw(B, T, D, seed=4), np.array([7, 2])
    whole, at_end, _ = apply(params(), x_BTD)
    prompt_BTD = x_BTD[:, :7].copy()
    prompt_BTD[1, 2:] = 100 * draw(5, D, seed=5)
    y_BTD, state, _ = apply(params(), prompt_BTD, None, lengths_B)
    for b, length in enumerate(lengths_B):
        np.testing.assert_allclose(y_BTD[b, :length], whole[b, :length], atol=2e-5)
    at = lengths_B.copy()
    while np.any(at < T):
        token = np.stack([x_BTD[b, [min(at[b], T - 1)]] for b in range(B)])
        real_B = (at < T).astype(np.int32)
        y_B1D, state, _ = apply(params(), token, state, real_B)
        for b in np.flatnonzero(real_B):
            np.testing.assert_allclose(y_B1D[b, 0], whole[b, at[b]], atol=2e-5)
        at += real_B
    close(jax.tree.leaves(state), jax.tree.leaves(at_end), atol=1e-5)


def test_a_long_call_continues_from_a_state():
    x_BTD = draw(B, T, D, seed=4)
    whole, at_end, _ = apply(params(), x_BTD)
    _, state, _ = apply(params(), x_BTD[:, :5])
    y_BTD, state, _ = apply(params(), x_BTD[:, 5:], state)
    close([y_BTD], [whole[:, 5:]], atol=2e-5)
    close(jax.tree.leaves(state), jax.tree.leaves(at_end), atol=1e-5)


def test_fp4_sites_take_the_projections_and_leave_the_gates():
    x_BTD = draw(B, T, D, seed=4)
    y_BTD, _, quantized = apply(params(), x_BTD, policy=FP4_SITES)
    weights = dict(params())
    for name in ("qkv", "z", "out"):
        weights[name] = fp4.quantize(weights[name], "nvfp4", "tensor").values
    weights = jax.tree.map(np.float64, weights)
    seen_BTD = fp4.quantize(x_BTD, "nvfp4").values
    heads = fp4.quantize(layer(x_BTD, weights, CFG, seen_BTD), "nvfp4").values
    expected = {"delta_net/in": seen_BTD, "delta_net/out": heads}
    assert quantized.keys() == expected.keys()
    for site, q in quantized.items():
        np.testing.assert_allclose(block_scaled.dequantize(q), expected[site], rtol=1e-5)
    close([y_BTD], [heads @ weights["out"].T], atol=1e-4)


def test_a_gradient_step_reaches_every_parameter():
    x_BTD = draw(B, T, D, seed=4)

    loss = lambda params: jnp.sum(jnp.sin(_apply(params, x_BTD, policy=FP4_SITES)[0]))
    for path, slope in jax.tree.leaves_with_path(quick(jax.grad(loss))(params())):
        assert np.all(np.isfinite(slope)), path
        assert np.any(slope != 0), path


def test_a_fresh_layer_remembers_and_its_heads_are_normed():
    x_BTD = draw(1, 64, 256)
    x_BTD /= np.sqrt(np.mean(x_BTD**2))
    cfg = dataclasses.replace(CFG, hidden_size=256, initializer_range=0.02)
    module = DeltaNet(cfg, name="delta_net")
    start = quick(lambda key: module.init(key, x_BTD[:, :1], context(NOTHING), None, None))
    p = nn.unbox(start(jax.random.key(0)))["params"]
    assert p.keys() == {"qkv", "z", "b", "a", "conv", "A_log", "dt_bias", "norm", "out"}
    rates, steps = np.exp(p["A_log"]), np.log1p(np.exp(p["dt_bias"]))
    assert np.all((rates >= 1) & (rates <= 16) & (steps >= 9.9e-4) & (steps <= 0.101))
    assert p["conv"].shape == (WIDTH, 4)
    assert 0.4 < np.std(p["conv"]) < 0.6
    exact = jax.tree.map(np.float64, p)
    z = x_BTD @ exact["z"].T
    gated = layer(x_BTD, exact, cfg) / (z * sigmoid(z))
    assert np.sqrt(np.mean(gated[:, 8:] ** 2)) > 0.9  # 1 unless the norm's epsilon takes over


def test_a_state_is_a_pytree():
    state = DeltaState(jnp.zeros((B, H, K, V)), jnp.zeros((B, 3, WIDTH)))
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(B, H, K, V), (B, 3, WIDTH)]
