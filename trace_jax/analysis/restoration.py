"""What each encoding restores of one row of values, by its width and by the noise between sides.

Rows are Gaussian, their channels scaled log-normally (as activations are, loosely); the trainer's
row is the rollout's with noise relative to each value. One quantizer by itself: in a model, what is
left over drifts on to the next site.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax.formats import block_scaled
from trace_jax.formats.quantize import quantize
from trace_jax.guidance import quantizer
from trace_jax.guidance.encoding import row_bytes

WIDTHS = (16, 64, 128, 256, 512, 2048)
NOISE = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05)
ENCODINGS = ("low1", "syndrome2", "syndrome", "syndrome4", "syndrome6", "scales", "bits")
VALUES = 2**21  # of a measurement
SPREAD = 0.5  # standard deviation of the log of a channel's scale


class Restored(NamedTuple):
    """Shares of codes that differ from the rollout's, and bits a value with all scales."""

    nearest: float  # each side rounding to nearest
    guided: float
    bits: float


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _rates(encoding: str, width: int, fmt: str, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (VALUES // width, width)
    channels = jnp.exp(SPREAD * jax.random.normal(keys[0], (width,)))
    x = channels * jax.random.normal(keys[1], shape)
    trained = x * (1 + noise * jax.random.normal(keys[2], shape))
    rollout = quantize(x, fmt)
    differing = lambda q: jnp.mean(block_scaled.unpack(q) != block_scaled.unpack(rollout))
    guided, _ = quantizer.round_guided(trained, quantizer.encode(rollout, encoding))
    return differing(quantize(trained, fmt)), differing(guided)


def restored(encoding: str, width: int, noise: float, fmt: str = "nvfp4") -> Restored:
    """What an encoding restores at a width and a noise (standard deviation over |x|)."""
    nearest, guided = _rates(encoding, width, fmt, jnp.float32(noise))
    return Restored(float(nearest), float(guided), 8 * row_bytes(encoding, width, fmt) / width)


def table() -> str:
    """Markdown: for each width and encoding the share of changed codes that stay changed."""
    head = " | ".join(f"{noise:.1%}" for noise in NOISE)
    lines = [f"| width | encoding | bits a value | {head} |", "|---" * (len(NOISE) + 3) + "|"]
    for width in WIDTHS:
        for encoding in ENCODINGS:
            found = [restored(encoding, width, noise) for noise in NOISE]
            cells = " | ".join(f"{one.guided / one.nearest:.2%}" for one in found)
            lines.append(f"| {width} | {encoding} | {found[0].bits:.3f} | {cells} |")
    return "\n".join(lines)
