"""Grouped-query attention over FP4 keys and values, with rotary positions.

    q = rope(norm(x Wq)), k = rope(norm(x Wk)), v = x Wv;  y = softmax(q k / sqrt(C)) v Wo
Gated models take a gate beside each query head: y = (softmax(...) v * sigmoid(gate)) Wo.
K and V are quantized after norm and rotation, along the head, as they enter the cache; attention
reads the quantized values in prefill, decode and training alike. With an indexer, a query reads
only the tokens that it selects (sparse_attention.py). Source: qwen.md 2.1 to 2.3.

Letters: B sequences, T tokens, S positions attended, D model, H query heads, K key/value heads,
Q query heads a key head (H / K), C head size.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import BlockScaled, Operand, to_compute
from trace_jax.kernels.matmul import matmul
from trace_jax.models import cache as caches
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.cache import Cache
from trace_jax.models.layer_context import LayerContext
from trace_jax.models.normalization import RMSNorm
from trace_jax.models.parameters import weight
from trace_jax.models.rotary import rope
from trace_jax.models.sparse_attention import Indexer


def attend(
    q_BTHC: jax.Array,
    k_BKSC: Operand,
    v_BKSC: Operand,
    positions_BT: jax.Array,
    selected_BTS: jax.Array | None = None,
) -> jax.Array:
    """Causal attention, float32 [B, T, H, C]: token at position p reads positions 0..p of S.

    Of these, only the selected ones, where a selection is given.

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
    if selected_BTS is not None:
        seen_BTS &= selected_BTS
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
        cache: Cache | None,
        row: jax.Array,
    ) -> tuple[jax.Array, Cache | None, dict[str, BlockScaled | None]]:
        """Output float32 [B, T, D], the cache with K and V in its `row`, what was quantized."""
        cfg = self.cfg
        D, C, H, K = cfg.hidden_size, cfg.head_dim, cfg.num_heads, cfg.num_kv_heads
        B, T = x_BTD.shape[:2]

        def project(name, x, heads, size=C):
            shape, axes = (heads * size, D), ("heads", "embed")
            w_FD = weight(self, name, shape, axes, context, cfg.initializer_range)
            return matmul(x, w_FD).reshape(B, T, heads, size)

        def norm(name, heads):
            if not cfg.qk_norm:
                return heads
            return RMSNorm(C, cfg.rms_norm_eps, cfg.zero_centered_norms, name=name)(heads)

        rotate = lambda heads: rope(heads, positions_BT, cfg.rope_theta, cfg.rotary_dim)
        x, q_in = context.quantize("attention/in", x_BTD)
        if cfg.attention_gate:
            q_BTHC, gate_BTHC = jnp.split(project("q", x, H, 2 * C), 2, axis=-1)
        else:
            q_BTHC = project("q", x, H)
        q_BTHC = rotate(norm("q_norm", q_BTHC))
        k, q_k = context.quantize("attention/k", rotate(norm("k_norm", project("k", x, K))))
        v, q_v = context.quantize("attention/v", project("v", x, K))

        if cache is None:
            k_BKSC, v_BKSC = caches.heads_first(k), caches.heads_first(v)
        else:
            new_k = q_k if context.policy.fmt("attention/k") else k.values
            new_v = q_v if context.policy.fmt("attention/v") else v.values
            cache = caches.write(cache, row, positions_BT, new_k, new_v)
            k_BKSC, v_BKSC = caches.read(cache, row, context.dtype)
        selected_BTS = None
        if cfg.indexer:
            indexer = Indexer(cfg, name="indexer")
            index_q_BTHC, keys = indexer(x_BTD, positions_BT, context)
            if cache is not None:
                cache, keys = caches.remember_index_keys(cache, row, positions_BT, keys)
            selected_BTS = indexer.select(index_q_BTHC, keys, positions_BT)
        q_BTHC = to_compute(q_BTHC, context.dtype)
        y_BTHC = attend(q_BTHC, k_BKSC, v_BKSC, positions_BT, selected_BTS)
        if cfg.attention_gate:
            y_BTHC = y_BTHC * jax.nn.sigmoid(gate_BTHC)

        y, q_out = context.quantize("attention/out", y_BTHC.reshape(B, T, H * C))
        w_DF = weight(self, "o", (D, H * C), ("embed", "heads"), context, cfg.initializer_range)
        quantized = {
            "attention/in": q_in, "attention/k": q_k, "attention/v": q_v, "attention/out": q_out,
        }  # fmt: skip
        return matmul(y, w_DF), cache, quantized
