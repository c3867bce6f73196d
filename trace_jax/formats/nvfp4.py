"""NVFP4: E2M1 codes, an E4M3 scale for each 16 values, a float32 outer scale.

The order of operations is Transformer Engine's; algebraically equal orders differ in 1e-4 to 1e-3
of the codes on BF16 data, so every user here (trainer, rollout, cache, export) comes to this one.

    S     = min(2688 / amax, FMAX), or 1 where amax or S is 0        2688 = 6 * 448
    outer = 1 / S
    scale = e4m3(min(block_amax * (S * fl(1/6)), 448))               clamped before the cast
    code  = e2m1(x * min(1 / (scale * outer), FMAX))
Source: method.md 3.2 and 3.3 (edge cases).
"""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.formats import block_scaled, e2m1, e4m3
from trace_jax.formats.block_scaled import FLOAT32_MAX, BlockScaled

BLOCK = 16
RANGE = np.float32(e2m1.MAX * e4m3.MAX)
dequantize = block_scaled.dequantize


def encoding_scale(amax: jax.Array, largest: float = RANGE) -> jax.Array:
    """S, float32: what brings tensors or rows of largest magnitude amax (any shape) to 2688.

    Or to another `largest`.
    """
    encoding = jnp.minimum(np.float32(largest) / amax, FLOAT32_MAX)
    return jnp.where((amax == 0) | (encoding == 0), 1, encoding)


def outer_scales(
    magnitude: jax.Array, outer: str | jax.Array, largest: float = RANGE
) -> tuple[jax.Array, jax.Array]:
    """(encoding scale S, outer scale) float32, of the largest magnitudes [..., n/16] of blocks.

    outer: "row", "tensor", or the decoding scale itself, as in `scales_of`.
    """
    if isinstance(outer, str):
        if outer not in ("row", "tensor"):
            raise ValueError(f"outer={outer!r}: choose 'row', 'tensor' or pass an array")
        total = block_scaled.largest_magnitude(magnitude, axis=-1 if outer == "row" else None)
        encoding = encoding_scale(total, largest)
        return encoding, 1 / encoding
    outer = jnp.asarray(outer, jnp.float32)
    return 1 / outer, outer


def scales_of(x: jax.Array, outer: str | jax.Array = "row") -> tuple[jax.Array, jax.Array]:
    """Block scales float8_e4m3fn [..., n/16] and outer (decoding) scale float32 of x [..., n].

    outer: "row" (one a last-axis row: activations, K and V), "tensor" (one in all: weights, under
    vmap one a matrix), or a decoding scale that is given, shaped as a prefix of x's leading axes.
    Raises ValueError for another string or when 16 does not divide n.
    """
    blocks = block_scaled.split_blocks(block_scaled.to_float32(x), BLOCK)
    magnitude = block_scaled.largest_magnitude(blocks)
    encoding, outer = outer_scales(magnitude, outer)
    scale = _unrounded(magnitude, encoding)
    # The barrier keeps XLA from folding the cast away or the two reciprocals into one.
    return jax.lax.optimization_barrier((scale.astype(jnp.float8_e4m3fn), outer))


def unrounded(x: jax.Array, outer: jax.Array) -> jax.Array:
    """The block scales float32 [..., n/16] of x under a given outer scale, before the cast."""
    blocks = block_scaled.split_blocks(block_scaled.to_float32(x), BLOCK)
    return _unrounded(block_scaled.largest_magnitude(blocks), 1 / outer)


def _unrounded(magnitude, encoding):
    factor = block_scaled.expand_prefix(encoding * np.float32(1 / 6), magnitude.ndim)
    return jnp.minimum(jnp.minimum(magnitude * factor, FLOAT32_MAX), e4m3.MAX)


def quantize(x: jax.Array, outer: str | jax.Array = "row") -> BlockScaled:
    """x [..., n] rounded to nearest in NVFP4. `outer` and errors as in `scales_of`."""
    scales, outer = scales_of(x, outer)
    codes = e2m1.encode(block_scaled.normalise(x, scales, outer))
    return block_scaled.pack(codes, scales, outer, "nvfp4")
