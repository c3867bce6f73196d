"""Hyper-connections: residual streams that a block reads through a mix and writes with a gain each.

    n = norm of each stream;  mix = sigmoid(Wup silu(Wdown n / s));  x = mean over streams (mix * n)
    X_c <- X_c + gain_c y,  gain = 2 sigmoid(Winject n / s)
Down, up and inject see all s streams at once. They stand in place of the residual connection and of
the norms ahead of a layer's blocks; the last one, in place of the final norm, only reads.
Source: qwen.md 2.1 and 2.7.

Letters: B sequences, T tokens, s streams, D model.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.kernels.matmul import float32_einsum, matmul
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.layer_context import LayerContext
from trace_jax.models.normalization import RMSNorm
from trace_jax.models.parameters import parameter, weight


def tile(x_BTD: jax.Array, streams: int) -> jax.Array:
    """The streams that the first layer reads, float32 [B, T, streams, D]: each is the embedding."""
    x_BT1D = x_BTD.astype(jnp.float32)[:, :, None]
    return jnp.broadcast_to(x_BT1D, (*x_BTD.shape[:2], streams, x_BTD.shape[-1]))


class HyperConnection(nn.Module):
    """The connection of one block to the streams."""

    cfg: ModelConfig
    inject: bool = True  # whether the block writes back

    @nn.compact
    def __call__(
        self, x_BTsD: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array] | None]:
        """What the block reads, float32 [B, T, D], and how it writes.

        The latter takes the block's output [B, T, D] to the new streams, float32 [B, T, s, D]; it
        is None without `inject`.
        """
        cfg, std = self.cfg, self.cfg.initializer_range
        B, T, s, D = x_BTsD.shape
        rank = cfg.hyper_connection.rank
        down = weight(self, "down", (rank, s * D), (None, "embed"), context, std)
        up = weight(self, "up", (s * D, rank), ("embed", None), context, std)

        norm = RMSNorm(s * D, cfg.rms_norm_eps, cfg.zero_centered_norms, groups=s, name="norm")
        n_BTsD = norm(x_BTsD)
        wide = n_BTsD.reshape(B, T, s * D)
        low = jax.nn.silu(matmul(context.plain(wide), down) / s)
        mix = jax.nn.sigmoid(matmul(context.plain(low), up))
        read_BTD = jnp.mean(mix.reshape(n_BTsD.shape) * n_BTsD, axis=2)
        if not self.inject:
            return read_BTD, None

        normal = nn.initializers.normal(std)
        inject = parameter(self, "inject", (s, s * D), (None, "embed"), normal)
        logits_BTs = float32_einsum("BTN,sN->BTs", wide, inject.astype(jnp.float32))
        gain_BTs = 2 * jax.nn.sigmoid(logits_BTs / s)

        def write(y_BTD):
            return x_BTsD + gain_BTs[..., None] * y_BTD[:, :, None]

        return read_BTD, write
