"""Grouped-query attention over FP4 keys and values, with RMS-normed heads and rotary positions.

    q = rope(norm(x Wq)), k = rope(norm(x Wk)), v = x Wv;  y = softmax(q k / sqrt(C)) v Wo
K and V are quantized after norm and rotation, along the head, as they enter the cache; attention
reads the quantized values in prefill, decode and training alike. Source: qwen.md 2.1 to 2.3.

Letters: B sequences, T tokens, S positions attended, D model, H query heads, K key/value heads,
Q query heads a key head (H / K), C head size.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import BlockScaled, Operand, to_compute
from trace_jax.kernels.matmul import matmul
from trace_jax.models import cache as kv_cache
from trace_jax.models.cache import KVCache
from trace_jax.models.config import ModelConfig
from trace_jax.models.layer_context import LayerContext
from trace_jax.models.parameters import parameter, weight


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """scale * x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


class RMSNorm(nn.Module):
    """RMS norm with a learned scale, float32 in and out."""

    size: int
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x normed and scaled, float32."""
        scale = parameter(self, "scale", (self.size,), ("norm",), nn.initializers.ones)
        return rms_norm(x, scale, self.eps)


def rope(x_BTHC: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """x rotated by its position, half-split pairs (c, c + C/2), float32. Source: qwen.md 2.2."""
    half = x_BTHC.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x_BTHC[..., :half], x_BTHC[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(
    q_BTHC: jax.Array, k_BKSC: Operand, v_BKSC: Operand, positions_BT: jax.Array
) -> jax.Array:
    """Causal attention, float32 [B, T, H, C]: token at position p reads positions 0..p of S.

    The outer scales of K multiply the scores, those of V the probabilities; softmax in float32.
    """
    B, T, H, C = q_BTHC.shape
    K, S = k_BKSC.values.shape[1:3]
    q_BTKQC = q_BTHC.reshape(B, T, K, H // K, C)
    scores = jnp.einsum(
        "BTKQC,BKSC->BKQTS", q_BTKQC, k_BKSC.values, preferred_element_type=jnp.float32
    )
    if k_BKSC.outer is not None:
        scores = scores * k_BKSC.outer[:, :, None, None, :]
    seen_BTS = jnp.arange(S) <= positions_BT[:, :, None]
    scores = jnp.where(seen_BTS[:, None, None], scores * C**-0.5, -jnp.inf)
    probability = jax.nn.softmax(scores, axis=-1)
    if v_BKSC.outer is not None:
        probability = probability * v_BKSC.outer[:, :, None, None, :]
    probability = to_compute(probability, v_BKSC.values.dtype)
    # BTKQC in one einsum has no BF16 kernel on CPU; the transpose costs nothing elsewhere.
    y_BKQTC = jnp.einsum(
        "BKQTS,BKSC->BKQTC", probability, v_BKSC.values, preferred_element_type=jnp.float32
    )
    return y_BKQTC.transpose(0, 3, 1, 2, 4).reshape(B, T, H, C)


class Attention(nn.Module):
    """The attention block of one layer."""

    cfg: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        context: LayerContext,
        cache: KVCache | None,
        layer: jax.Array,
    ) -> tuple[jax.Array, KVCache | None, dict[str, BlockScaled]]:
        """Output float32 [B, T, D], the cache with this layer's K and V, what was quantized."""
        cfg = self.cfg
        D, C, H, K = cfg.hidden_size, cfg.head_dim, cfg.num_heads, cfg.num_kv_heads
        B, T = x_BTD.shape[:2]

        def project(name, x, heads):
            w_FD = weight(
                self, name, (heads * C, D), ("heads", "embed"), context, cfg.initializer_range
            )
            return matmul(x, w_FD).reshape(B, T, heads, C)

        x, q_in = context.quantize("attention/in", x_BTD)
        norm = lambda name, heads: RMSNorm(C, cfg.rms_norm_eps, name=name)(heads)
        q_BTHC = rope(norm("q_norm", project("q", x, H)), positions_BT, cfg.rope_theta)
        k_BTKC = rope(norm("k_norm", project("k", x, K)), positions_BT, cfg.rope_theta)
        k, q_k = context.quantize("attention/k", k_BTKC)
        v, q_v = context.quantize("attention/v", project("v", x, K))

        if cache is None:
            k_BKSC, v_BKSC = kv_cache.heads_first(k), kv_cache.heads_first(v)
        else:
            new_k = q_k if context.policy.fmt("attention/k") else k.values
            new_v = q_v if context.policy.fmt("attention/v") else v.values
            cache = kv_cache.write(cache, layer, positions_BT, new_k, new_v)
            k_BKSC, v_BKSC = kv_cache.read(cache, layer, context.dtype)
        y_BTHC = attend(to_compute(q_BTHC, context.dtype), k_BKSC, v_BKSC, positions_BT)

        y, q_out = context.quantize("attention/out", y_BTHC.reshape(B, T, H * C))
        w_DF = weight(self, "o", (D, H * C), ("embed", "heads"), context, cfg.initializer_range)
        quantized = {
            "attention/in": q_in, "attention/k": q_k, "attention/v": q_v, "attention/out": q_out,
        }  # fmt: skip
        return matmul(y, w_DF), cache, {s: q for s, q in quantized.items() if q is not None}
