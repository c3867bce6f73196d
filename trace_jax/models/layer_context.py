"""What a layer needs to know to quantize its activations: policy, compute dtype, guides."""

import dataclasses

import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import BlockScaled, Operand
from trace_jax.guidance import quantizer
from trace_jax.guidance.policy import Policy
from trace_jax.guidance.quantizer import Guide


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """One layer's share of the forward's arguments."""

    policy: Policy
    dtype: jnp.dtype
    guides: dict[str, Guide]  # by site; empty when nothing guides this forward
    guided: jax.Array | bool  # whether this layer is among the recorded ones

    def quantize(self, site: str, x: jax.Array) -> tuple[Operand, BlockScaled | None]:
        """The Operand of x [..., n] (float32) at a site, and its codes (None where it has none).

        Guided where this layer and site were recorded, else to nearest; gradient straight through.
        """
        return self.quantize_under(site, x, self.guides.get(site))

    def quantize_under(
        self, site: str, x: jax.Array, guide: Guide | None
    ) -> tuple[Operand, BlockScaled | None]:
        """`quantize` with a guide laid out like x, for sites whose rows were moved."""
        fmt = self.policy.fmt(site)
        fixed = jax.lax.stop_gradient(x)
        if fmt is None:
            seen = dict(self.policy.observed).get(site)
            q = None if seen is None else quantizer.round_value(fixed, seen, "row", None)
            return Operand(x.astype(self.dtype), None), q
        nearest = lambda: quantizer.round_value(fixed, fmt, "row", None)
        guided = lambda: quantizer.round_value(fixed, fmt, "row", guide)
        if guide is None or self.guided is False:
            q = nearest()
        elif self.guided is True:
            q = guided()
        else:
            q = jax.lax.cond(self.guided, guided, nearest)
        return quantizer.quantize_operand(x, q, self.dtype), q
