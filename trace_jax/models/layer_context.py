"""What a layer needs to know to quantize its activations: policy, compute dtype, guides, noise."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax.formats import block_scaled
from trace_jax.formats.block_scaled import BlockScaled, Operand, to_compute
from trace_jax.guidance import quantizer
from trace_jax.guidance.encoding import Guide
from trace_jax.guidance.policy import SITES, Policy
from trace_jax.guidance.record import LayerGuide


class EngineNoise(NamedTuple):
    """Another engine's kernels, ahead of the sites: Gaussian noise relative to each value, or BF16.

    Trainer and rollout here share one forward, so on one machine they hardly differ; two real
    engines differ by BF16 rounding and reduction order (0.2 to 1%). The noise emulates that; the
    rounding is real: an engine that keeps its activations in BF16 between operations. experts/mid
    gets neither: it is a pointwise function of a product of FP4 operands, which is exact up to
    summation order.
    """

    key: jax.Array
    relative: jax.Array | float  # standard deviation over |x|; a scalar, or one a layer
    bfloat16: jax.Array | bool = False  # whether x is rounded to BF16; a scalar, or one a layer

    def at_layer(self, layer: jax.Array | int) -> "EngineNoise":
        """The noise of one layer, with draws of its own."""
        mine = lambda given: jnp.asarray(given)[layer] if jnp.ndim(given) else given
        key = jax.random.fold_in(self.key, layer)
        return EngineNoise(key, mine(self.relative), mine(self.bfloat16))

    def disturb(self, site: str, x: jax.Array) -> jax.Array:
        """x [..., n] (float32) as that engine brings it to a site of this layer."""
        draw = jax.random.normal(jax.random.fold_in(self.key, SITES.index(site)), x.shape)
        rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return jnp.where(self.bfloat16, rounded, x) * (1 + self.relative * draw)


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """One layer's share of the forward's arguments."""

    policy: Policy
    dtype: jnp.dtype
    guides: dict[str, LayerGuide] = dataclasses.field(default_factory=dict)  # by site, if recorded
    noise: EngineNoise | None = None

    def quantize(self, site: str, x: jax.Array) -> tuple[Operand, BlockScaled | None]:
        """The Operand of x [..., n] (float32) at a site, and its codes (None where it has none).

        Guided where this layer and site were recorded, else to nearest; gradient straight through.
        """
        if self.noise is not None:
            x = self.noise.disturb(site, x)
        return self.quantize_under(site, x, self.guide(site))

    def guide(self, site: str) -> Guide | None:
        """What was recorded of a site, whether in this layer or not; None where nothing was."""
        return self.guides[site].guide if site in self.guides else None

    def plain(self, x: jax.Array) -> Operand:
        """The Operand of an activation that is not quantized."""
        return Operand(to_compute(x, self.dtype), None)

    def quantize_under(
        self, site: str, x: jax.Array, guide: Guide | None
    ) -> tuple[Operand, BlockScaled | None]:
        """`quantize` with a guide laid out like x, for sites whose rows were moved."""
        fmt = self.policy.fmt(site)
        fixed = jax.lax.stop_gradient(x)
        if fmt is None:
            seen = dict(self.policy.observed).get(site)
            q = None if seen is None else quantizer.round_value(fixed, seen, "row", None)
            return self.plain(x), q
        nearest = lambda: quantizer.round_value(fixed, fmt, "row", None)
        guided = lambda: quantizer.round_value(fixed, fmt, "row", guide)
        if guide is None:
            q = nearest()
        elif self.guides[site].covers is True:
            q = guided()
        else:
            q = jax.lax.cond(self.guides[site].covers, guided, nearest)
        operand = quantizer.quantize_operand(x, q, self.dtype)
        if share := self.policy.residual_share(site):
            left = quantizer.residual(fixed, q, share)
            operand = operand._replace(residual=block_scaled.operand(left, self.dtype))
        return operand, q
