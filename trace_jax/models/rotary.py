"""Rotary positions over the first dimensions of a head. Source: qwen.md 2.2."""

import jax
import jax.numpy as jnp


def rope(x_BTHC: jax.Array, positions_BT: jax.Array, theta: float, rotary_dim: int) -> jax.Array:
    """x with its first `rotary_dim` values rotated by position, float32; the others pass.

    Pairs are half-split, (c, c + rotary_dim / 2), with frequency theta^(-2c / rotary_dim).
    """
    half = rotary_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x_BTHC = x_BTHC.astype(jnp.float32)
    first, second = x_BTHC[..., :half], x_BTHC[..., half:rotary_dim]
    rotated = [first * cos - second * sin, second * cos + first * sin, x_BTHC[..., rotary_dim:]]
    return jnp.concatenate(rotated, axis=-1)
