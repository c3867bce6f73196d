"""The grouped product of mixture-of-experts layers, for any number of experts, dropping no token.

Rows are sorted by expert into blocks of equal height, each block belonging to one expert; the
product is one small matmul a block. Work grows with the tokens routed, not with the number of
experts, as a masked dense product would (`jax.lax.ragged_dot` is one on CPU and CUDA). Each expert
wastes at most one block.

Letters: N tokens, A experts a token, E experts, b blocks, R rows a block, D in, F out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax.formats import bits
from trace_jax.formats.block_scaled import Operand


class Dispatch(NamedTuple):
    """Where each (token, choice) goes, and which expert owns each block."""

    slot_NA: jax.Array  # int32, row in the [b * R] stack of blocks
    expert_b: jax.Array  # int32
    rows: int  # R
    used: jax.Array | None = None  # int32, blocks in use, where other devices own the rest


def dispatch_plan(expert_NA: jax.Array, num_experts: int) -> Dispatch:
    """The Dispatch of tokens to chosen experts, int32 [N, A] in [0, num_experts)."""
    expert = expert_NA.reshape(-1)
    average = max(1, expert.size // num_experts)
    rows = min(64, max(4, 1 << (average - 1).bit_length()))
    blocks = -(-expert.size // rows) + num_experts
    order = jnp.argsort(expert, stable=True)
    count_E = jnp.bincount(expert, length=num_experts)
    used_E = -(-count_E // rows)
    first_row_E = (jnp.cumsum(used_E) - used_E) * rows
    rank = jnp.arange(expert.size) - (jnp.cumsum(count_E) - count_E)[expert[order]]
    slot = jnp.zeros_like(expert).at[order].set(first_row_E[expert[order]] + rank)
    expert_b = jnp.repeat(jnp.arange(num_experts), used_E, total_repeat_length=blocks)
    return Dispatch(slot.reshape(expert_NA.shape), expert_b, rows)


def dispatch_plan_of_share(
    expert_NA: jax.Array, first: jax.Array, here: int, num_experts: int
) -> Dispatch:
    """The Dispatch to experts first .. first + here - 1 alone, of `num_experts` in all.

    Room is for every choice, so none is dropped however uneven they fall; only the blocks in use
    are computed. Choices of other experts have a slot past the last block: `to_blocks` leaves them
    out, `from_blocks` reads zero.
    """
    expert = expert_NA.reshape(-1) - first
    mine = (expert >= 0) & (expert < here)
    expert = jnp.where(mine, expert, here)  # another device's: sorts last
    average = max(1, expert.size // num_experts)
    rows = min(64, max(4, 1 << (average - 1).bit_length()))
    blocks = -(-expert.size // rows) + here
    order = jnp.argsort(expert, stable=True)
    count = jnp.bincount(expert, length=here + 1)
    used_E = -(-count[:here] // rows)
    first_row = jnp.append((jnp.cumsum(used_E) - used_E) * rows, blocks * rows)
    rank = jnp.arange(expert.size) - (jnp.cumsum(count) - count)[expert[order]]
    slot = jnp.zeros_like(expert).at[order].set(first_row[expert[order]] + rank)
    expert_b = jnp.repeat(jnp.arange(here), used_E, total_repeat_length=blocks)
    return Dispatch(slot.reshape(expert_NA.shape), expert_b, rows, jnp.sum(used_E))


def to_blocks(x_NA: jax.Array, plan: Dispatch) -> jax.Array:
    """Rows x [N, A, ...] laid out in blocks [b, R, ...]; rows that nobody owns are zero."""
    blocks = plan.expert_b.shape[0]
    rows = x_NA.reshape(-1, *x_NA.shape[2:])
    stack = jnp.zeros((blocks * plan.rows, *rows.shape[1:]), rows.dtype)
    stack = stack.at[plan.slot_NA.reshape(-1)].set(
        rows, unique_indices=True, mode=None if plan.used is None else "drop"
    )
    return stack.reshape(blocks, plan.rows, *rows.shape[1:])


def from_blocks(y_bR: jax.Array, plan: Dispatch) -> jax.Array:
    """Rows [N, A, ...] of blocks [b, R, ...]; the inverse of `to_blocks`."""
    rows = y_bR.reshape(-1, *y_bR.shape[2:])
    if plan.used is None:
        return rows[plan.slot_NA]
    return rows.at[plan.slot_NA].get(mode="fill", fill_value=0)


@jax.custom_vjp
def block_product(
    x_bRD: jax.Array, w_EFD: jax.Array, expert_b: jax.Array, used: jax.Array | None = None
) -> jax.Array:
    """x of each block times its expert's matrix transposed, float32 [b, R, F].

    Blocks from `used` on, where it is given, are zero and cost nothing.

    Backward: dx and dw by the same walk over blocks; dw is accumulated in float32. Rows of dx are
    stacked as integers, so that each block writes its own rows only (formats/bits.py).
    """

    def product(x_RD, expert):
        return jnp.einsum("RD,FD->RF", x_RD, w_EFD[expert], preferred_element_type=jnp.float32)

    if used is None:
        return jax.lax.map(lambda block: product(*block), (x_bRD, expert_b))

    def one(block):
        x_RD, expert, index = block
        nothing = lambda x_RD, _: jnp.zeros((x_RD.shape[0], w_EFD.shape[1]), jnp.float32)
        return jax.lax.cond(index < used, product, nothing, x_RD, expert)

    return jax.lax.map(one, (x_bRD, expert_b, jnp.arange(expert_b.shape[0])))


def _block_product_forward(x_bRD, w_EFD, expert_b, used=None):
    return block_product(x_bRD, w_EFD, expert_b, used), (x_bRD, w_EFD, expert_b, used)


def _block_product_backward(saved, dy_bRF):
    x_bRD, w_EFD, expert_b, used = saved

    def one(dw_EFD, block):
        x_RD, dy_RF, expert = block
        dy_RF = dy_RF.astype(x_RD.dtype)
        dx_RD = jnp.einsum("RF,FD->RD", dy_RF, w_EFD[expert], preferred_element_type=jnp.float32)
        dw_FD = jnp.einsum("RF,RD->FD", dy_RF, x_RD, preferred_element_type=jnp.float32)
        return dw_EFD.at[expert].add(dw_FD), bits.hold(dx_RD.astype(x_RD.dtype))

    def one_if_used(dw_EFD, indexed):
        index, block = indexed
        nothing = lambda dw_EFD, block: (dw_EFD, bits.hold(jnp.zeros_like(block[0])))
        return jax.lax.cond(index < used, one, nothing, dw_EFD, block)

    zero_EFD, blocks = jnp.zeros(w_EFD.shape, jnp.float32), (x_bRD, dy_bRF, expert_b)
    if used is None:
        dw_EFD, dx_bRD = jax.lax.scan(one, zero_EFD, blocks)
    else:
        indexed = (jnp.arange(expert_b.shape[0]), blocks)
        dw_EFD, dx_bRD = jax.lax.scan(one_if_used, zero_EFD, indexed)
    return bits.restore(dx_bRD, x_bRD.dtype), dw_EFD.astype(w_EFD.dtype), None, None


block_product.defvjp(_block_product_forward, _block_product_backward)


def grouped_matmul(x_bR: Operand, w_E: Operand, plan: Dispatch) -> jax.Array:
    """Blocks x [b, R, D] times their experts' matrices w [E, F, D] transposed, float32 [b, R, F].

    Outer scales, one a row of x and one an expert of w, are applied after the product; the product
    of a residual, if x has one, is added.
    """
    y_bRF = block_product(x_bR.values, w_E.values, plan.expert_b, plan.used)
    if x_bR.outer is not None:
        y_bRF = y_bRF * x_bR.outer[..., None]
    if w_E.outer is not None:
        y_bRF = y_bRF * w_E.outer[plan.expert_b][:, None, None]
    return y_bRF if x_bR.residual is None else y_bRF + grouped_matmul(x_bR.residual, w_E, plan)
