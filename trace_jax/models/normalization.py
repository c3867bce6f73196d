"""RMS norms, ordinary and zero-centred, in float32. Source: qwen.md 2.1."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.models.parameters import parameter


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """scale * x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


class RMSNorm(nn.Module):
    """RMS norm with a learned scale, float32 in and out.

    Zero-centred, the stored scale w stands for 1 + w and starts at 0. With several groups, each is
    normed by itself and has its own part of the scale.
    """

    size: int
    eps: float
    zero_centered: bool = False
    groups: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size], or [..., groups, size / groups], normed and scaled."""
        start = nn.initializers.zeros if self.zero_centered else nn.initializers.ones
        scale = parameter(self, "scale", (self.size,), ("norm",), start).astype(jnp.float32)
        if self.zero_centered:
            scale = 1 + scale
        if self.groups > 1:
            scale = scale.reshape(self.groups, -1)
        return rms_norm(x, scale, self.eps)
