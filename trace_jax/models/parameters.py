"""How a layer declares a weight, and what it reads back: an Operand, whatever leaf is there.

A weight leaf is a master array (quantized on the fly where the policy says so, gradient straight
through), a packed BlockScaled (the same numbers in 3.5 times fewer bytes) or an Operand unpacked
from one. Layers cannot tell.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.formats import block_scaled
from trace_jax.formats import quantize as formats
from trace_jax.formats.block_scaled import BlockScaled, Operand, to_compute
from trace_jax.guidance import quantizer
from trace_jax.models.layer_context import LayerContext


def parameter(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Callable,
) -> jax.Array | BlockScaled | Operand:
    """The parameter `name` of a module; made float32 by `init` with its logical axes named."""
    make = nn.with_logical_partitioning(init, axes)
    # `variable` rather than `param`: the leaf may be a BlockScaled, whose arrays have other shapes.
    return module.variable(
        "params", name, lambda: make(module.make_rng("params"), shape, jnp.float32)
    ).value


def weight(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    context: LayerContext,
    std: float,
) -> Operand:
    """The Operand of a weight [..., F, D]: unpacked from FP4, fake-quantized, or plain.

    Which of the last two, the policy's site of "module/name" decides; values in the compute dtype.
    """
    fmt, dtype = context.policy.weight_fmt(f"{module.name}/{name}"), context.dtype
    leaf = parameter(module, name, shape, axes, nn.initializers.normal(std))
    return read(leaf, fmt, dtype)


def read(leaf: jax.Array | BlockScaled | Operand, fmt: str | None, dtype: jnp.dtype) -> Operand:
    """The Operand of a weight leaf, whatever it is; a master array is first quantized in `fmt`."""
    if isinstance(leaf, Operand):
        return leaf
    if isinstance(leaf, BlockScaled):
        return block_scaled.operand(leaf, dtype)
    if fmt is None:
        return Operand(to_compute(leaf, dtype), None)
    q = formats.quantize_matrices(jax.lax.stop_gradient(leaf), fmt)
    return quantizer.quantize_operand(leaf, q, dtype)
