"""Rounding to any format by name: the one quantizer of trainer, rollout, cache and export."""

import jax
import jax.numpy as jnp

from trace_jax.formats import bits, block_scaled, e4m3, four_over_six, mxfp4, nvfp4
from trace_jax.formats.block_scaled import FORMATS, BlockScaled


def check_format(fmt: str) -> str:
    """fmt itself. Raises ValueError, listing the choices, when it is not a format."""
    if fmt not in FORMATS:
        raise ValueError(f"unknown format {fmt!r}: choose one of {sorted(FORMATS)}")
    return fmt


def scales_of(x: jax.Array, fmt: str, outer: str | jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Block scales and outer scale (None for MX) of x [..., n] in the named format."""
    if check_format(fmt) == "nvfp4":
        return nvfp4.scales_of(x, outer)
    if fmt == four_over_six.NAME:
        return four_over_six.scales_of(x, outer)
    return mxfp4.scales_of(x, fmt), None


def scales_of_parity(x: jax.Array, fmt: str, outer: jax.Array | None, odd: jax.Array) -> jax.Array:
    """Block scales of x [..., n] under a given outer scale whose codes have the parities `odd`.

    odd: uint8 [..., n/b]. Neighbouring scales differ in the low bit of their code, so where x's own
    has the wrong one, a neighbour is meant: the one on the side to which the unrounded scale leans.
    Not for 4/6, where the other side may have taken a scale 1.5 times as large, nor for MXFP8.
    """
    given = None if outer is None else jnp.where(outer == 0, 1, outer)
    scales, _ = scales_of(x, fmt, given)
    nv = fmt == "nvfp4"
    leaning = nvfp4.unrounded(x, given) if nv else mxfp4.unrounded(x, fmt)
    largest = e4m3.LARGEST if nv else mxfp4.LARGEST_SCALE
    code = bits.hold(scales)
    up = ((leaning >= scales.astype(jnp.float32)) | (code == 0)) & (code < largest)
    neighbour = jnp.where(up, code + 1, code - 1)
    meant = jnp.where(((code & 1) == odd) | (code > largest), code, neighbour)
    return bits.restore(meant, scales.dtype)


def quantize(x: jax.Array, fmt: str, outer: str | jax.Array = "row") -> BlockScaled:
    """x [..., n] rounded to nearest in the named format; `outer` as in nvfp4, unused by MX."""
    scales, outer = scales_of(x, fmt, outer)
    codes = FORMATS[fmt].element.encode(block_scaled.normalise(x, scales, outer))
    return block_scaled.pack(codes, scales, outer, fmt)


def quantize_matrices(w: jax.Array, fmt: str) -> BlockScaled:
    """Weights [..., F, D] rounded to nearest, one outer scale for each [F, D] matrix.

    What shares an outer scale is stacked on F: gate and up are one matrix [2F, D].
    """
    one = lambda matrix: quantize(matrix, fmt, outer="tensor")
    for _ in range(w.ndim - 2):
        one = jax.vmap(one)
    return one(w)
