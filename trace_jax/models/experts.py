"""The routed experts: router, FP4 grouped products, and the sites that guidance repairs.

    p = softmax(x Wr) over all experts;  the top-k are chosen;  weights p_k / sum(p_k)
    y = sum_k weight_k * (silu(x Wgate_k) * (x Wup_k)) Wdown_k
With replayed routes the chosen experts are the rollout's, while the weights still come from this
forward's own router logits, so the router keeps its gradient (R3, arXiv 2510.11370).
The input is quantized once a token, before dispatch. Source: qwen.md 2.5.

Where the mesh splits the experts, they stay and tokens travel: each device gathers the tokens of
its expert group, computes the choices that fall on its own experts, and the parts are summed back
to the tokens' devices. No buffer has a capacity to overflow, so no token is ever dropped.

Letters: B sequences, T tokens, N = B T, D model, F expert hidden, E experts, A chosen experts,
b blocks of R rows.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from trace_jax.formats import bits
from trace_jax.formats.block_scaled import BlockScaled, Operand
from trace_jax.guidance.encoding import Guide
from trace_jax.kernels import grouped_matmul as grouped
from trace_jax.kernels.matmul import float32_einsum
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.layer_context import LayerContext
from trace_jax.models.parameters import parameter, weight
from trace_jax.parallel.mesh import expert_shares, over_batch


def route(
    logits_BTE: jax.Array, replayed_BTA: jax.Array | None, cfg: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Experts to use int32, their weights float32, and the router's own choice, all [B, T, A].

    The first and last differ only where routes are replayed; a replayed id below 0 leaves the
    choice to the router. Ties go to the lower index.
    """
    probability_BTE = jax.nn.softmax(logits_BTE, axis=-1)
    _, own_BTA = jax.lax.top_k(probability_BTE, cfg.num_experts_per_token)
    chosen_BTA = own_BTA
    if replayed_BTA is not None:
        chosen_BTA = jnp.where(replayed_BTA < 0, own_BTA, replayed_BTA.astype(jnp.int32))
    if cfg.norm_topk_prob:
        # p_k / sum(p_k) is the softmax of the chosen logits, finite also where all p_k underflow.
        weight_BTA = jax.nn.softmax(jnp.take_along_axis(logits_BTE, chosen_BTA, axis=-1), axis=-1)
    else:
        weight_BTA = jnp.take_along_axis(probability_BTE, chosen_BTA, axis=-1)
    return chosen_BTA, weight_BTA, own_BTA


class Experts(nn.Module):
    """The mixture-of-experts block of one layer."""

    cfg: ModelConfig

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, context: LayerContext, replayed_BTA: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict[str, BlockScaled | None]]:
        """Output float32 [B, T, D], the router's own choice [B, T, A], and what was quantized."""
        cfg, std = self.cfg, self.cfg.initializer_range
        D, F, E = cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_experts
        normal = nn.initializers.normal(std)
        router_ED = parameter(self, "router", (E, D), ("expert", "embed"), normal)
        gate_up = weight(self, "gate_up", (E, 2 * F, D), ("expert", "mlp", "embed"), context, std)
        down = weight(self, "down", (E, D, F), ("expert", "embed", "mlp"), context, std)

        logits_BTE = float32_einsum("BTD,ED->BTE", x_BTD, router_ED.astype(jnp.float32))
        chosen_BTA, weight_BTA, own_BTA = route(logits_BTE, replayed_BTA, cfg)
        x, q_in = context.quantize("experts/in", x_BTD)

        parallel = expert_shares() > 1
        y_BTD, q_mid = over_batch(
            functools.partial(expert_mixture_of_group if parallel else expert_mixture, context),
            x,
            chosen_BTA,
            weight_BTA,
            context.guide("experts/mid"),
            whole=(gate_up, down),
            whole_spec=P("expert") if parallel else P(),
        )
        quantized = {"experts/in": q_in, "experts/mid": q_mid}
        return y_BTD, own_BTA, quantized


def expert_mixture(
    context: LayerContext,
    x_BT: Operand,
    chosen_BTA: jax.Array,
    weight_BTA: jax.Array,
    mid_guide: Guide | None,
    gate_up: Operand,
    down: Operand,
    share: tuple[jax.Array, int] | None = None,
) -> tuple[jax.Array, BlockScaled | None]:
    """The weighted sum of the chosen experts, float32 [B, T, D], and their quantized hidden rows.

    The hidden rows are [B, T, A, F] in the order of `chosen_BTA`, as is `mid_guide`. With `share`,
    (id of the first expert in gate_up and down, experts in all), other experts' choices add
    nothing and their hidden rows are all zero bits.
    """
    B, T, A = chosen_BTA.shape
    chosen_NA, here = chosen_BTA.reshape(B * T, A), gate_up.values.shape[0]
    if share is None:
        plan = grouped.dispatch_plan(chosen_NA, here)
    else:
        plan = grouped.dispatch_plan_of_share(chosen_NA, share[0], here, share[1])

    def spread(rows):  # [B, T, ...] -> blocks, a copy for each choice
        rows = rows.reshape(B * T, 1, *rows.shape[2:])
        return grouped.to_blocks(jnp.broadcast_to(rows, (B * T, A, *rows.shape[2:])), plan)

    def arrange(rows):  # [B, T, A, ...] of a guide -> blocks, the unowned rows all zero bits
        held = bits.hold(rows).reshape(B * T, A, *rows.shape[3:])
        return bits.restore(grouped.to_blocks(held, plan), rows.dtype)

    def restore(rows):  # blocks -> [B, T, A, ...]
        return grouped.from_blocks(rows, plan).reshape(B, T, A, *rows.shape[2:])

    hidden = grouped.grouped_matmul(jax.tree.map(spread, x_BT), gate_up, plan)
    gate, up = jnp.split(hidden, 2, axis=-1)
    mid, q_mid = context.quantize_under(
        "experts/mid", jax.nn.silu(gate) * up, jax.tree.map(arrange, mid_guide)
    )
    y_BTAD = restore(grouped.grouped_matmul(mid, down, plan))
    y_BTD = float32_einsum("BTAD,BTA->BTD", y_BTAD, weight_BTA)
    if share is None:
        return y_BTD, jax.tree.map(restore, q_mid)
    restore_bits = lambda rows: bits.restore(restore(bits.hold(rows)), rows.dtype)
    return y_BTD, jax.tree.map(restore_bits, q_mid)


def expert_mixture_of_group(
    context: LayerContext,
    x_BT: Operand,
    chosen_BTA: jax.Array,
    weight_BTA: jax.Array,
    mid_guide: Guide | None,
    gate_up: Operand,
    down: Operand,
) -> tuple[jax.Array, BlockScaled | None]:
    """`expert_mixture` of this device's tokens, its experts spread over the mesh axis `expert`.

    Runs under shard_map. Every device of the group works on all its tokens with its own experts.
    A hidden row is computed by one device, zero bits on the others: its sum is that row, bit for
    bit. Outputs are summed in another order than on one device.
    """

    def gather(rows):
        held = jax.lax.all_gather(bits.hold(rows), "expert", tiled=True)
        return bits.restore(held, rows.dtype)

    def gather_values(rows):  # differentiable
        return jax.lax.all_gather(rows, "expert", tiled=True)

    def sum_back(rows):
        return jax.lax.psum_scatter(rows, "expert", scatter_dimension=0, tiled=True)

    here, shares = gate_up.values.shape[0], expert_shares()
    y_BTD, q_mid = expert_mixture(
        context,
        *jax.tree.map(gather_values, (x_BT, chosen_BTA, weight_BTA)),
        jax.tree.map(gather, mid_guide),
        gate_up,
        down,
        share=(jax.lax.axis_index("expert") * here, here * shares),
    )
    return sum_back(y_BTD), jax.tree.map(
        lambda rows: bits.restore(sum_back(whole_bits(rows)), rows.dtype), q_mid
    )


def whole_bits(rows: jax.Array) -> jax.Array:
    """The rows' bits as unsigned integers of their size, which sum exactly."""
    if rows.dtype == jnp.float32:
        return jax.lax.bitcast_convert_type(rows, jnp.uint32)
    return bits.hold(rows)
