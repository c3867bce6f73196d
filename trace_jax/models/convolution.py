"""The short causal convolution, one filter a channel, and the rows that decode keeps of it.

    y_t = sum_i w_i x_{t - (W - 1 - i) dilation}        the last tap multiplies the current token
Float32; no bias, no activation. Used by Gated DeltaNet and by the n-gram embedding, there with a
dilation. Source: qwen.md 2.4 and 2.7.

Letters: B sequences, T tokens, N channels, W taps, P = (W - 1) dilation earlier rows.
"""

import jax
import jax.numpy as jnp


def causal_convolution(
    x_BTN: jax.Array,
    w_NW: jax.Array,
    tail_BPN: jax.Array,
    length_B: jax.Array | None,
    dilation: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """y float32 [B, T, N] and the new tail float32 [B, P, N], the input rows to continue from.

    tail: the P rows ahead of x, zeros at the start of a sequence; length: of each sequence, how
    many of the T tokens are real, the others being right padding (None: all). The new tail is the
    last P rows of tail and real tokens, so a call with the following tokens continues exactly.
    Raises ValueError where the shapes of x, filters and tail do not agree.
    """
    B, T, N = x_BTN.shape
    W = w_NW.shape[-1]
    P = (W - 1) * dilation
    if w_NW.shape != (N, W):
        raise ValueError(
            f"convolution w{w_NW.shape}: x{x_BTN.shape} has {N} channels, one filter each"
        )
    if tail_BPN.shape != (B, P, N):
        raise ValueError(
            f"convolution tail{tail_BPN.shape}: {W} taps, dilation {dilation}, over x{x_BTN.shape} "
            f"read {P} earlier rows; pass {(B, P, N)}"
        )
    rows = jnp.concatenate([tail_BPN, x_BTN], axis=1, dtype=jnp.float32)
    w_NW = w_NW.astype(jnp.float32)
    y_BTN = sum(rows[:, i * dilation : i * dilation + T] * w_NW[:, i] for i in range(W))
    if length_B is None:
        return y_BTN, rows[:, T:]
    last_BP = length_B[:, None] + jnp.arange(P)
    return y_BTN, jnp.take_along_axis(rows, last_BP[:, :, None], axis=1)
