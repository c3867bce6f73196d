"""The FP4 matrix product: operands exact in BF16, float32 accumulation, outer scales afterwards.

On hardware without FP4 units this *is* the W4A4 product up to summation order (design.md section
4). Tensors that are not quantized come as Operands without an outer scale and take the same path.
"""

import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import Operand, expand_prefix


def float32_einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    """An einsum of float32 arrays that no backend rounds to BF16 or TF32 first.

    For what trainer and rollout must agree on and is small, or decides: routers, gates, recurrent
    state, the head.
    """
    return jnp.einsum(subscripts, *operands, precision=jax.lax.Precision.HIGHEST)


def matmul(x: Operand, w: Operand) -> jax.Array:
    """x [..., D] times w [F, D] transposed, float32 [..., F]. w.outer, if any, is a scalar.

    Two products where x has a residual: code x block scale of a sum would not be exact in BF16.
    """
    y = jnp.einsum("...D,FD->...F", x.values, w.values, preferred_element_type=jnp.float32)
    for outer in (x.outer, w.outer):
        if outer is not None:
            y = y * expand_prefix(outer, y.ndim)
    return y if x.residual is None else y + matmul(x.residual, w)
