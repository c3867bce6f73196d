"""Weight sync: what a rollout holds of the master parameters, made once per policy version."""

from typing import Any

import jax
import jax.numpy as jnp

from trace_jax.formats import block_scaled
from trace_jax.formats.block_scaled import BlockScaled, to_compute
from trace_jax.formats.quantize import quantize_matrices
from trace_jax.guidance.policy import Policy

# Small parameters that are read in float32 on both sides, as they are, by name.
FLOAT32 = (
    "router", "scale",  # experts, norms
    "a", "b", "conv", "A_log", "dt_bias",  # delta_net
    "gate",  # shared_expert
    "inject",  # hyper-connections
)  # fmt: skip


def is_packed(leaf: Any) -> bool:
    """Whether a leaf of parameters is packed FP4; `is_leaf` of a map over them."""
    return isinstance(leaf, BlockScaled)


def pack(params: dict, policy: Policy, dtype: jnp.dtype) -> dict:
    """The masters as a rollout reads them: quantized weights packed FP4, the rest in `dtype`.

    A leaf that is packed already, as a checkpoint may bring it, stays.

    The packed numbers are those that the training forward makes on the fly from the same masters,
    bit for bit: both come from `formats.quantize.quantize_matrices`.
    """

    def one(path, leaf):
        fmt = policy.weight_fmt(weight_name(path))
        if is_packed(leaf):
            return leaf
        if fmt is not None:
            return quantize_matrices(leaf, fmt)
        return leaf if path[-1].key in FLOAT32 else to_compute(leaf, dtype)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_packed)


def weight_name(path: tuple) -> str:
    """The policy's name of the weight at a path of the parameter tree: "module/name"."""
    return "/".join(key.key for key in path[-2:])


def masters(params: dict) -> dict:
    """Float32 masters of parameters in any form: packed leaves dequantized, the rest widened."""
    one = lambda leaf: (
        block_scaled.dequantize(leaf) if is_packed(leaf) else leaf.astype(jnp.float32)
    )
    return jax.tree.map(one, params, is_leaf=is_packed)


pack_jit = jax.jit(pack, static_argnums=(1, 2))


def unpack(packed: dict, dtype: jnp.dtype) -> dict:
    """The packed weights as Operands in `dtype`, four times the bytes and the same numbers.

    Where memory allows, a rollout unpacks once a version instead of once a token.
    """
    one = lambda leaf: block_scaled.operand(leaf, dtype) if is_packed(leaf) else leaf
    return jax.tree.map(one, packed, is_leaf=is_packed)
