"""BlockScaled, the pytree of every FP4 tensor, and Operand, what a matrix product reads of it.

    value = element(code) * block scale * outer scale
The element is E2M1 in every FP4 format, two codes a byte, and E4M3 in MXFP8, one a byte.

Blocks lie along the last axis. The outer scale has a *prefix* of the leading axes: shape () is one
scale for the tensor, x.shape[:-1] one a row, [L, E] one for each expert's matrix of [L, E, F, D].
Leading axes therefore shard, scan and slice like those of an array.
"""

import dataclasses
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.formats import e2m1, e4m3

FLOAT32_MAX = float(np.finfo(np.float32).max)


class Format(NamedTuple):
    """What a tensor of a format is made of."""

    block: int  # values that share a block scale
    scale: type  # dtype of block scales
    outer: bool  # whether there is an outer scale
    element: ModuleType  # e2m1 or e4m3: what a code stands for


_NVFP4 = Format(16, jnp.float8_e4m3fn, True, e2m1)
_MXFP4 = Format(32, jnp.float8_e8m0fnu, False, e2m1)
FORMATS = {
    "nvfp4": _NVFP4,
    "nvfp4_4over6": _NVFP4,
    "mxfp4": _MXFP4,
    "mxfp4_floor": _MXFP4,
    "mxfp8": _MXFP4._replace(element=e4m3),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockScaled:
    """A tensor [..., n] in FP4, or MXFP8."""

    codes: jax.Array  # uint8 [..., n/2], element 2i in the low nibble; [..., n] for mxfp8
    scales: jax.Array  # float8_e4m3fn [..., n/16] (nvfp4) or float8_e8m0fnu [..., n/32] (mx)
    outer: jax.Array | None  # float32, decoding scale, a prefix of the leading axes; None for mx
    fmt: str = dataclasses.field(default="nvfp4", metadata=dict(static=True))  # a key of FORMATS

    @property
    def element(self) -> ModuleType:
        """What a code stands for: e2m1 or e4m3."""
        return FORMATS[self.fmt].element

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the codes stand for."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.element.BITS)

    def __getitem__(self, index) -> "BlockScaled":
        """The slice [index] over leading axes (ints, slices, arrays); the last axis stays whole."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) >= self.codes.ndim or any(i is None or i is Ellipsis for i in index):
            raise IndexError(
                f"BlockScaled{self.shape}: index {index} must name leading axes one by one; "
                "the last axis is blocked and stays whole"
            )
        outer = self.outer if self.outer is None else self.outer[index[: self.outer.ndim]]
        return BlockScaled(self.codes[index], self.scales[index], outer, self.fmt)


class Operand(NamedTuple):
    """What a matrix product reads: value = values * outer, the outer scale applied after the dot.

    For FP4 the values are code x block scale: at most 6 significant bits (for NVFP4 within
    [2^-10, 2688]), hence exact in bfloat16; so are MXFP8's, of 4 bits. A tensor that is not
    quantized has outer None. Where a residual stands beside the values, its own product with the
    same matrix is added.
    """

    values: jax.Array  # [..., n], compute dtype
    outer: jax.Array | None  # float32, a prefix of the leading axes, or None
    residual: "Operand | None" = None  # [..., n] in FP4: what rounding has left of an activation


def to_float32(x: jax.Array) -> jax.Array:
    """x as float32 with its own precision pinned.

    XLA may skip the rounding to bfloat16 that precedes a conversion back; a block maximum would
    then be taken over values the other side never saw. reduce_precision cannot be skipped.
    """
    if x.dtype == jnp.float32:
        return x
    info = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)


def to_compute(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x rounded to the compute dtype, for good.

    A plain cast to bfloat16 that is widened again later (a dot on CPU, a float32 head) may be
    skipped by XLA in one program and not in another: the trainer, which casts masters, would then
    read other weights than the rollout, which holds them in bfloat16.
    """
    if x.dtype == dtype or dtype == jnp.float32:
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)
    return rounded.astype(dtype)


def split_blocks(x: jax.Array, block: int) -> jax.Array:
    """x [..., n] as [..., n/block, block]. Raises ValueError when the block does not divide n."""
    if x.shape[-1] % block:
        raise ValueError(
            f"last axis of {x.shape} is {x.shape[-1]}, not a multiple of the block {block}; "
            f"pad it to {-(-x.shape[-1] // block) * block} or leave this tensor in BF16"
        )
    return x.reshape(*x.shape[:-1], -1, block)


def largest_magnitude(x: jax.Array, axis: int | None = -1) -> jax.Array:
    """max |x| of float32 x over an axis (None: all), NaN where any value is.

    Compared as integers, in whose order NaN comes after Inf: XLA's maximum of floats may drop a NaN
    (on CPU in large arrays, and in the reduction over devices), and the NaN would become a zero.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis), jnp.float32)


def expand_prefix(outer: jax.Array, ndim: int) -> jax.Array:
    """A prefix-shaped scale with trailing ones, ready to multiply an array of `ndim` axes."""
    return outer.reshape(outer.shape + (1,) * (ndim - outer.ndim))


def block_factor(scales: jax.Array, outer: jax.Array | None) -> jax.Array:
    """Float32 [..., n/b]: what a decoded code is multiplied by (block scale x outer scale)."""
    factor = scales.astype(jnp.float32)
    return factor if outer is None else factor * expand_prefix(outer, factor.ndim)


def normalise(x: jax.Array, scales: jax.Array, outer: jax.Array | None) -> jax.Array:
    """z float32 [..., n] = x in units of its block's scale: the value that is rounded to a code.

    The reciprocal is taken first and multiplied, as Transformer Engine does, and clamped to the
    largest float32 so that a zero scale gives 0 for a zero x. Source: method.md 3.2, 1.12.
    """
    multiplier = jnp.minimum(1 / block_factor(scales, outer), FLOAT32_MAX)
    z = split_blocks(to_float32(x), x.shape[-1] // scales.shape[-1]) * multiplier[..., None]
    return z.reshape(x.shape)


def pack(codes: jax.Array, scales: jax.Array, outer: jax.Array | None, fmt: str) -> BlockScaled:
    """BlockScaled of unpacked codes uint8 [..., n]."""
    return BlockScaled(e2m1.pack_bits(codes, FORMATS[fmt].element.BITS), scales, outer, fmt)


def unpack(q: BlockScaled) -> jax.Array:
    """Codes uint8 [..., n], one a byte."""
    return e2m1.unpack_bits(q.codes, q.element.BITS)


def scaled_codes(codes: jax.Array, factor: jax.Array, element: ModuleType) -> jax.Array:
    """Float32 [..., n] = code * its block's factor [..., n/b]; exactly +0 where the factor is 0."""
    blocks = split_blocks(element.decode(codes), codes.shape[-1] // factor.shape[-1])
    return jnp.where(factor[..., None] == 0, 0, blocks * factor[..., None]).reshape(codes.shape)


def dequantize(q: BlockScaled) -> jax.Array:
    """Float32 [..., n]: code * (block scale * outer scale)."""
    return scaled_codes(unpack(q), block_factor(q.scales, q.outer), q.element)


def operand(q: BlockScaled, dtype: jnp.dtype) -> Operand:
    """The Operand of q: code * block scale in `dtype` (exact in bfloat16), outer scale apart."""
    values = scaled_codes(unpack(q), block_factor(q.scales, None), q.element)
    return Operand(values.astype(dtype), q.outer)
