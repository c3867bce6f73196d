"""Gated DeltaNet: linear attention whose memory is a matrix that decays and is corrected.

    [q | k | v] = silu(conv(x Wqkv));  z = x Wz;  beta = sigmoid(x Wb)
    g = -exp(A_log) softplus(x Wa + dt_bias)                   logarithm of the decay, at most 0
    q <- q / |q| / sqrt(K);  k <- k / |k|;  a key head serves consecutive value heads
    S <- exp(g_t) S;  u = beta_t (v_t - S^T k_t);  S <- S + k_t u^T;  o_t = S^T q_t
    y = (norm(o) gate(z)) Wout
The memory S goes from token to token (`recurrent`: decode) or over chunks of them (`chunked`:
prefill and training), with the same result up to rounding. All but the products with Wqkv, Wz and
Wout is float32. Source: qwen.md 2.1 and 2.4.

Letters: B sequences, T tokens, D model, H value heads, G key heads, K and V sizes of a key and of a
value head, N channels of the convolution or chunks, C tokens a chunk (I and J where two are met).
"""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.guidance import quantizer
from trace_jax.kernels.matmul import float32_einsum, matmul
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.convolution import causal_convolution
from trace_jax.models.layer_context import LayerContext
from trace_jax.models.normalization import RMSNorm
from trace_jax.models.parameters import parameter, weight

CHUNK = 64  # tokens
GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState:
    """What a DeltaNet layer keeps of the tokens so far; its size does not grow with them."""

    state_BHKV: jax.Array  # float32
    tail_BPN: jax.Array  # float32, the last inputs of the convolution


def empty(cfg: ModelConfig, batch: int) -> DeltaState:
    """The state ahead of the first token: zeros."""
    d = cfg.delta_net
    return DeltaState(
        jnp.zeros((batch, d.num_value_heads, d.key_head_dim, d.value_head_dim), jnp.float32),
        jnp.zeros((batch, d.conv_size - 1, d.conv_width), jnp.float32),
    )


def unit(x: jax.Array) -> jax.Array:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _for_value_heads(q_BTGK, k_BTGK, heads):
    """q and k [B, T, H, K], normed, q scaled; the first H/G value heads read key head 0, and on."""
    repeat = lambda x: jnp.repeat(x, heads // x.shape[2], axis=2)
    return repeat(unit(q_BTGK) * q_BTGK.shape[-1] ** -0.5), repeat(unit(k_BTGK))


def recurrent(
    q_BTGK: jax.Array,
    k_BTGK: jax.Array,
    v_BTHV: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    state_BHKV: jax.Array,
    fmt: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, V] and the state after the last token, float32: one token after the other.

    q and k come as the convolution leaves them, before norm and repetition. A token with beta = 0
    and g = 0 leaves the state as it is. fmt: an FP4 format that the state is held in, rounded to
    nearest along V after each write, and so read; the gradient passes straight through.
    """
    q_BTHK, k_BTHK = _for_value_heads(q_BTGK, k_BTGK, v_BTHV.shape[2])

    def step(before, token):
        q, k, v, g, beta = token
        state = jnp.exp(g)[..., None, None] * before
        u = beta[..., None] * (v - float32_einsum("BHKV,BHK->BHV", state, k))
        state = state + k[..., :, None] * u[..., None, :]
        if fmt is not None:
            # What is rounded twice may move twice: a token that writes nothing must not round.
            writes = (beta != 0) | (g != 0)
            rounded = quantizer.fake_quantize(state, fmt)
            state = jnp.where(writes[..., None, None], rounded, before)
        return state, float32_einsum("BHKV,BHK->BHV", state, q)

    tokens = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH)
    tokens = [x.swapaxes(0, 1) for x in tokens]
    state_BHKV, o_TBHV = jax.lax.scan(step, state_BHKV, tokens)
    return o_TBHV.swapaxes(0, 1), state_BHKV


def chunked(
    q_BTGK: jax.Array,
    k_BTGK: jax.Array,
    v_BTHV: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    state_BHKV: jax.Array,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """What `recurrent` returns without fmt, by matrix products over chunks of tokens.

    With decay_ij = exp(g_(j+1) + ... + g_i), 0 for j > i, and e_i = exp(g_1 + ... + g_i):
        A = I + strict_lower(beta_i (k_i . k_j) decay_ij)
        E = A^-1 beta v - (A^-1 beta e k) S                   the corrections u of all its tokens
        O = (e q) S + ((q_i . k_j) decay_ij) E;  S <- e_C S + (decay_Cj k_j)^T E
    """
    T, H = v_BTHV.shape[1:3]
    q_BTHK, k_BTHK = _for_value_heads(q_BTGK, k_BTGK, H)
    chunk = min(chunk, T)
    padding = -T % chunk

    def split(x_BTH):  # [B, T, H, ...] -> [N, B, H, C, ...]; padding has beta = 0 and g = 0
        x_BTH = jnp.pad(x_BTH, [(0, 0), (0, padding)] + [(0, 0)] * (x_BTH.ndim - 2))
        x_BNCH = x_BTH.reshape(x_BTH.shape[0], -1, chunk, *x_BTH.shape[2:])
        return jnp.moveaxis(x_BNCH, (1, 3), (0, 2))

    q, k, v, g, beta = map(split, (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH))
    decay_IJ, decay_I = decays(g)
    inverse_IJ = unit_lower_inverse(
        beta[..., None] * float32_einsum("...IK,...JK->...IJ", k, k) * decay_IJ
    )
    inverse_IJ = inverse_IJ * beta[..., None, :]
    u = float32_einsum("...IJ,...JV->...IV", inverse_IJ, v)
    w = float32_einsum("...IJ,...JK->...IK", inverse_IJ, decay_I[..., None] * k)
    scores_IJ = float32_einsum("...IK,...JK->...IJ", q, k) * decay_IJ

    def step(state, inputs):
        q, k, u, w, scores_IJ, decay = inputs
        e_BHCV = u - float32_einsum("BHCK,BHKV->BHCV", w, state)
        o_BHCV = float32_einsum("BHCK,BHKV->BHCV", q, state)
        o_BHCV = o_BHCV + float32_einsum("BHIJ,BHJV->BHIV", scores_IJ, e_BHCV)
        state = decay[..., None, None] * state + float32_einsum("BHCK,BHCV->BHKV", k, e_BHCV)
        return state, o_BHCV

    q, k = q * decay_I[..., None], k * decay_IJ[..., -1, :, None]
    inputs = (q, k, u, w, scores_IJ, decay_I[..., -1])
    state_BHKV, o_NBHCV = jax.lax.scan(step, state_BHKV, inputs)
    o_BNCHV = jnp.moveaxis(o_NBHCV, (0, 2), (1, 3))
    return o_BNCHV.reshape(o_BNCHV.shape[0], T + padding, *v_BTHV.shape[2:])[:, :T], state_BHKV


def decays(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """decay_ij [..., C, C] and e_i [..., C] of `chunked`, for g [..., C].

    Each sum is taken for itself. The difference of two running sums, the usual form, is off by the
    rounding of the larger: by 6e-5 of the result where some tokens decay by exp(-50).
    """
    C = g.shape[-1]
    past_IJ = jnp.tril(jnp.ones((C, C), bool))
    later = jnp.where(jnp.tril(past_IJ, -1), g[..., None], 0)
    sum_IJ = float32_einsum("IL,...LJ->...IJ", past_IJ.astype(jnp.float32), later)
    # Masked ahead of exp, whose own gradient is then 0 there.
    return jnp.exp(jnp.where(past_IJ, sum_IJ, -jnp.inf)), jnp.exp(g[..., :1] + sum_IJ[..., 0])


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """The inverses of lower triangular matrices [..., C, C] with ones on the diagonal.

    Only what lies below the diagonal is read. Inverted diagonal blocks of 1, 2, 4, ... rows are
    joined in pairs, as stably as by substitution:
        [P 0; R Q]^-1 = [P^-1 0; -Q^-1 R P^-1  Q^-1]
    All matrix products: XLA's triangular solve on CPU calls LAPACK, whose threads get in the way of
    XLA's (0.4 ms became 500, a gradient never came back). Backward: da = -x^T dx x^T.
    """
    C = a.shape[-1]

    def join(i, x):
        block = jnp.arange(C) >> i
        r = jnp.where((block[:, None] == block + 1) & (block % 2 == 0), a, 0)
        return x - _product(_product(x, r), x)

    identity = jnp.broadcast_to(jnp.eye(C, dtype=a.dtype), a.shape)
    return jax.lax.fori_loop(0, (C - 1).bit_length(), join, identity)


def _product(x, y):
    return float32_einsum("...IL,...LJ->...IJ", x, y)


def _inverse_forward(a):
    x = unit_lower_inverse(a)
    return x, x


def _inverse_backward(x, dx):
    transposed = x.swapaxes(-1, -2)
    return (jnp.tril(-_product(_product(transposed, dx), transposed), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def initial_rates(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """A_log of a fresh model: the log of uniform(1, 16), as published code of Mamba-2 has it."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1, 16))


def initial_steps(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """dt_bias of a fresh model: its softplus is log-uniform in 0.001 to 0.1.

    So published code of Mamba-2 and Gated DeltaNet has it; heads then remember 1 to 1000 tokens. At
    the 1 that the released Qwen code starts from, most would forget within one token.
    """
    steps = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(1e-1)))
    return jnp.log(jnp.expm1(steps))


class DeltaNet(nn.Module):
    """The Gated DeltaNet block of one layer."""

    cfg: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        context: LayerContext,
        before: DeltaState | None,
        length_B: jax.Array | None,
    ) -> tuple[jax.Array, DeltaState, dict[str, BlockScaled | None]]:
        """Output float32 [B, T, D], the DeltaState after these tokens, and what was quantized.

        before: the DeltaState to go on from (None: the start of a sequence); length: how many of
        the T tokens of each sequence are real (None: all); the others, right padding, change
        nothing. Where the policy has a format for "delta_net/state", the state is rounded after
        each token, so that training too goes token by token.
        """
        d, std = self.cfg.delta_net, self.cfg.initializer_range
        B, T, D = x_BTD.shape
        value_heads = (B, T, d.num_value_heads, d.value_head_dim)
        project = lambda x, name, width: matmul(
            x, weight(self, name, (width, D), ("heads", "embed"), context, std)
        )
        x, q_in = context.quantize("delta_net/in", x_BTD)
        qkv_BTN, z_BTV = project(x, "qkv", d.conv_width), project(x, "z", d.value_width)
        beta_BTH, g_BTH = self.gates(x_BTD, length_B)

        # Taps that keep the variance; at `std` the heads would drown in the epsilon of their norm.
        taps = nn.initializers.normal(d.conv_size**-0.5)
        conv_NW = parameter(self, "conv", (d.conv_width, d.conv_size), ("heads", None), taps)
        before = empty(self.cfg, B) if before is None else before
        qkv_BTN, tail_BPN = causal_convolution(qkv_BTN, conv_NW, before.tail_BPN, length_B)
        q, k, v = jnp.split(jax.nn.silu(qkv_BTN), [d.key_width, 2 * d.key_width], axis=-1)
        q_BTGK, k_BTGK = (x.reshape(B, T, d.num_key_heads, d.key_head_dim) for x in (q, k))

        fmt = context.policy.fmt("delta_net/state")
        if T == 1 or fmt is not None:
            attend = functools.partial(recurrent, fmt=fmt)
        else:
            attend = chunked
        o_BTHV, state_BHKV = attend(
            q_BTGK, k_BTGK, v.reshape(value_heads), g_BTH, beta_BTH, before.state_BHKV
        )

        norm = RMSNorm(d.value_head_dim, self.cfg.rms_norm_eps, name="norm")
        o_BTHV = norm(o_BTHV) * GATES[d.gate](z_BTV.reshape(value_heads))
        o, q_out = context.quantize("delta_net/out", o_BTHV.reshape(B, T, d.value_width))
        w_DV = weight(self, "out", (D, d.value_width), ("embed", "heads"), context, std)
        quantized = {"delta_net/in": q_in, "delta_net/out": q_out}
        return matmul(o, w_DV), DeltaState(state_BHKV, tail_BPN), quantized

    def gates(self, x_BTD: jax.Array, length_B: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """beta and g float32 [B, T, H], 0 at padding; from x itself, not its quantized value."""
        H, D = self.cfg.delta_net.num_value_heads, self.cfg.hidden_size

        def read(name, axes, init):
            shape = (H, D)[: len(axes)]
            return parameter(self, name, shape, axes, init).astype(jnp.float32)

        normal = nn.initializers.normal(self.cfg.initializer_range)
        b_BTH, a_BTH = (
            float32_einsum("BTD,HD->BTH", x_BTD, read(name, ("heads", "embed"), normal))
            for name in ("b", "a")
        )
        rate_H = jnp.exp(read("A_log", ("heads",), initial_rates))
        beta_BTH = jax.nn.sigmoid(b_BTH)
        g_BTH = -rate_H * jax.nn.softplus(a_BTH + read("dt_bias", ("heads",), initial_steps))
        if length_B is None:
            return beta_BTH, g_BTH
        real_BT1 = (jnp.arange(x_BTD.shape[1]) < length_B[:, None])[..., None]
        return jnp.where(real_BT1, beta_BTH, 0), jnp.where(real_BT1, g_BTH, 0)
