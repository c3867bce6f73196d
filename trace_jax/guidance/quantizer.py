"""The guided FP4 quantizer (TRACE sections 3.1 and 3.2).

The rollout keeps, of every value it quantizes, a few bits of the E2M1 code and the scales: a
`Guide` (guidance/encoding.py). The trainer normalises its own value by the *recorded* scale, takes
the two neighbouring codes around it, and lets the guide pick one:

    z = clip(x / s, -6, 6)       {low, high} = bracket(z)       code = the one the guide names
(E4M3 codes, clipped at 448, in MXFP8.)

    codes     the neighbour nearer to the recorded code: |q - q_rollout| never above that of
              rounding to nearest with the same scale
    low1      the neighbour whose low bit matches; neighbours always differ in it
    low2      the neighbour nearer to the closest code with those low bits
    syndrome  as low1, with low bits and scales inferred from their parities
Wherever z lies exactly on the grid it stays, so replaying a rollout's own values changes nothing.

Every gradient here is straight through: d y / d x = 1, nothing for the guide.
"""

import jax
import jax.numpy as jnp

from trace_jax.formats import block_scaled, e2m1
from trace_jax.formats import quantize as formats
from trace_jax.formats.block_scaled import FORMATS, BlockScaled, Operand
from trace_jax.guidance import encoding, syndrome
from trace_jax.guidance.encoding import ENCODINGS, OWN, PARITY, Guide, encode

__all__ = ["Guide", "encode", "fake_quantize", "quantize_guided"]


def _pick_low1(element, z, low, high, bit):
    return jnp.where((low & 1) == bit, low, high)


def _pick_codes(element, z, low, high, code):
    # In the direction of z; the recorded code never lies strictly inside the bracket.
    recorded = element.decode(code) * jnp.where(z < 0, -1, 1)
    return jnp.where(recorded >= element.magnitude(high), high, low)


def _pick_low2(element, z, low, high, bits):
    # Every fourth code has the two low bits. The closest one stands in: the next from `low` up, or
    # the one before it, which may lie across zero; of equally close ones the latter.
    up = low + ((bits - low) & 3)
    above = jnp.where(up > element.LARGEST, jnp.inf, element.magnitude(up))
    below = jnp.where(up < 4, -element.magnitude(bits), element.magnitude(up - 4))
    recorded = jnp.where(above - jnp.abs(z) < jnp.abs(z) - below, above, below)
    return jnp.where(recorded >= element.magnitude(high), high, low)


# By the bits of a code that are known.
PICK = {1: _pick_low1, 2: _pick_low2, 4: _pick_codes, 8: _pick_codes}


def round_guided(x: jax.Array, guide: Guide) -> tuple[BlockScaled, jax.Array]:
    """x [..., n] rounded under guidance, and bool [..., n]: where no neighbour fits the guide.

    A value is out of its bracket when neither neighbour carries the recorded bits: the trainer has
    drifted further than one code. With one bit a value or less that cannot be seen (always False).
    """
    element, checks = FORMATS[guide.fmt].element, ENCODINGS[guide.encoding].checks
    scales, outer = _scales(x, guide)
    z = block_scaled.normalise(x, scales, outer)
    known = 1 if checks else encoding.bits_of(guide.encoding, guide.fmt)
    if not known:
        q = block_scaled.pack(element.encode(z), scales, outer, guide.fmt)
        return q, jnp.zeros(x.shape, bool)
    z = jnp.clip(z, -element.MAX, element.MAX)
    low, high = element.bracket(z)
    recorded = _low_bits(z, low, high, guide) if checks else e2m1.unpack_bits(guide.bits, known)
    # Apart, since fused into the rounding the unpacking keeps XLA on CPU from vectorizing all of
    # it.
    recorded = jax.lax.optimization_barrier(recorded)
    picked = jnp.where(low == high, low, PICK[known](element, z, low, high, recorded))
    codes = element.with_sign(picked, z)
    return (
        block_scaled.pack(codes, scales, outer, guide.fmt),
        (low != high) & ((codes & jnp.uint8(2**known - 1)) != recorded),
    )


def _scales(x, guide):
    """(block scales, outer scale) that x is rounded in: recorded, restored, or x's own."""
    kept = ENCODINGS[guide.encoding].scales
    if kept == OWN:
        return formats.scales_of(x, guide.fmt, "row")
    if kept == PARITY:
        _, odd = encoding.read_syndrome(guide, x.shape[-1])
        return formats.scales_of_parity(x, guide.fmt, guide.outer, odd), guide.outer
    return guide.scales, guide.outer


def _low_bits(z, low, high, guide):
    """The rollout's low bits, inferred: the trainer's own, but where the checks say otherwise."""
    own = e2m1.encode(z) & 1
    checks, _ = encoding.read_syndrome(guide, z.shape[-1])
    differs = syndrome.parities(own, checks.shape[-1]) ^ checks
    if guide.outer is None:
        padding = jnp.all(guide.bits == 0, axis=-1, keepdims=True)
    else:
        padding = block_scaled.expand_prefix(guide.outer, differs.ndim) == 0
    differs = jnp.where(padding, 0, differs)  # no record, nothing to explain
    midpoint = (e2m1.magnitude(low) + e2m1.magnitude(high)) / 2
    away = jnp.where(low == high, DEGENERATE, jnp.abs(z) - midpoint)
    # The noise is in part relative to the value, in part common to all.
    doubt = away**2 / (1 + midpoint**2)
    return own ^ syndrome.flips(doubt, differs).astype(jnp.uint8)


DEGENERATE = 2.0  # a distance: values on the grid keep their code whatever their bit


def round_value(x: jax.Array, fmt: str, outer: str | jax.Array, guide: Guide | None) -> BlockScaled:
    """x [..., n] rounded under guidance where a guide is given, else to nearest."""
    return formats.quantize(x, fmt, outer) if guide is None else round_guided(x, guide)[0]


@jax.custom_vjp
def straight_through(x: jax.Array, values: jax.Array, outer: jax.Array | None) -> jax.Array:
    """`values`, where values * outer stands for x. Backward: dx = dvalues / outer, nothing else.

    Through the product with `outer` that follows, d y / d x is 1: the straight-through estimator.
    """
    return values


def _straight_through_forward(x, values, outer):
    return values, (outer, jnp.zeros((), x.dtype))


def _straight_through_backward(saved, d_values):
    outer, like = saved
    dx = d_values.astype(jnp.float32)
    if outer is not None:
        outer = block_scaled.expand_prefix(outer, dx.ndim)
        dx = jnp.where(outer == 0, 0, dx / outer)  # an all-zero guide: padding, no gradient
    return dx.astype(like.dtype), None, None


straight_through.defvjp(_straight_through_forward, _straight_through_backward)


def quantize_operand(x: jax.Array, q: BlockScaled, dtype: jnp.dtype) -> Operand:
    """The Operand of q in `dtype`, with x's gradient straight through; q is x, quantized."""
    fixed = block_scaled.operand(jax.lax.stop_gradient(q), dtype)
    return fixed._replace(values=straight_through(x, fixed.values, fixed.outer))


def residual(x: jax.Array, q: BlockScaled, share: float) -> BlockScaled:
    """What rounding x [..., n] to q has left, itself in FP4: Q(x - q) on a share of the channels.

    Of each row, those with the largest |x - q| (ties included); the others are 0. The choice is a
    row's own, so that a token's residual depends on no other token of the call: prefill, decode and
    any batch agree. No gradient.

    Source: residual activation compensation, QUADS (arXiv 2607.15810), which leaves half of the
    channels out; by what it ranks them is not known.
    """
    # Apart, since a fused multiply-subtract would round differently from program to program.
    rounded = jax.lax.optimization_barrier(block_scaled.dequantize(q))
    left = jax.lax.stop_gradient(x - rounded)
    kept = max(1, round(share * x.shape[-1]))
    least = jnp.sort(jnp.abs(left), axis=-1)[..., -kept, None]
    return formats.quantize(jnp.where(jnp.abs(left) >= least, left, 0), q.fmt, "row")


@jax.custom_vjp
def quantize_guided(x: jax.Array, guide: Guide) -> jax.Array:
    """x rounded under guidance, float32 [..., n]. Backward: identity to x, nothing to the guide."""
    return block_scaled.dequantize(round_guided(x, guide)[0])


def fake_quantize(x: jax.Array, fmt: str = "nvfp4", outer: str | jax.Array = "row") -> jax.Array:
    """x rounded to nearest in `fmt`, float32 [..., n]. Backward: identity (straight through)."""
    q = formats.quantize(jax.lax.stop_gradient(x), fmt, outer)
    return straight_through(x, block_scaled.dequantize(q), None)


def _guided_forward(x, guide):
    return quantize_guided(x, guide), jnp.zeros((), x.dtype)


def _guided_backward(like, dy):
    return dy.astype(like.dtype), None


quantize_guided.defvjp(_guided_forward, _guided_backward)
