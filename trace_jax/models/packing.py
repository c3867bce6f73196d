"""Weight sync: what a rollout holds of the master parameters, made once per policy version."""

import jax
import jax.numpy as jnp

from trace_jax.formats import block_scaled
from trace_jax.formats.block_scaled import BlockScaled, to_compute
from trace_jax.formats.quantize import quantize_matrices
from trace_jax.guidance.policy import Policy

FLOAT32 = ("router", "scale")  # routers and norms are read in float32 on both sides


def pack(params: dict, policy: Policy, dtype: jnp.dtype) -> dict:
    """The masters as a rollout reads them: quantized weights packed FP4, the rest in `dtype`.

    The packed numbers are those that the training forward makes on the fly from the same masters,
    bit for bit: both come from `formats.quantize.quantize_matrices`.
    """

    def one(path, leaf):
        name = path[-1].key
        fmt = policy.weight_fmt(name)
        if fmt is not None:
            return quantize_matrices(leaf, fmt)
        return leaf if name in FLOAT32 else to_compute(leaf, dtype)

    return jax.tree_util.tree_map_with_path(one, params)


pack_jit = jax.jit(pack, static_argnums=(1, 2))


def unpack(packed: dict, dtype: jnp.dtype) -> dict:
    """The packed weights as Operands in `dtype`, four times the bytes and the same numbers.

    Where memory allows, a rollout unpacks once a version instead of once a token.
    """
    is_packed = lambda leaf: isinstance(leaf, BlockScaled)
    one = lambda leaf: block_scaled.operand(leaf, dtype) if is_packed(leaf) else leaf
    return jax.tree.map(one, packed, is_leaf=is_packed)
