"""The gated feed-forward block that every token passes: of dense models, and the shared expert.

    y = (silu(x Wgate) * (x Wup)) Wdown
The shared expert is added to the routed ones times sigmoid(x ws). Source: qwen.md 2.5.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.kernels.matmul import float32_einsum, matmul
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.layer_context import LayerContext
from trace_jax.models.parameters import parameter, weight


class MLP(nn.Module):
    """A gated block of `width` hidden values; its name is that of its sites, "mlp/in" and so on."""

    cfg: ModelConfig
    width: int
    output_gate: bool = False  # the shared expert's

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, dict[str, BlockScaled | None]]:
        """Output float32 [B, T, D], and what was quantized."""
        D, F, std = self.cfg.hidden_size, self.width, self.cfg.initializer_range
        x, q_in = context.quantize(f"{self.name}/in", x_BTD)
        gate_up = weight(self, "gate_up", (2 * F, D), ("mlp", "embed"), context, std)
        down = weight(self, "down", (D, F), ("embed", "mlp"), context, std)
        gate, up = jnp.split(matmul(x, gate_up), 2, axis=-1)
        mid, q_mid = context.quantize(f"{self.name}/mid", jax.nn.silu(gate) * up)
        y_BTD = matmul(mid, down)
        if self.output_gate:
            normal = nn.initializers.normal(std)
            gate_1D = parameter(self, "gate", (1, D), (None, "embed"), normal)
            gate_BT1 = float32_einsum("BTD,GD->BTG", x_BTD, gate_1D.astype(jnp.float32))
            y_BTD = y_BTD * jax.nn.sigmoid(gate_BT1)
        return y_BTD, {f"{self.name}/in": q_in, f"{self.name}/mid": q_mid}
