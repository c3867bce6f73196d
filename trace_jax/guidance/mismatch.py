"""How far apart two roundings of the same tokens are: code and scale mismatch, and D_act.

    code rate   share of E2M1 codes that differ
    scale rate  share of block scales that differ
    d_act       ||Q_train - Q_rollout||_F / ||Q_rollout||_F over matching values (TRACE section 2,
                which states it unnormalised)
Both sides come as Guidance in the encoding "codes". Letters: L layers, B sequences, T tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.formats import block_scaled
from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.guidance.encoding import Guide
from trace_jax.guidance.record import Guidance, SiteLayers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Sums over the valid tokens of one site, each [L] or, sequence by sequence, [L, B].

    They add up over sites and batches.
    """

    codes: jax.Array  # codes that differ
    values: jax.Array  # codes compared
    scales: jax.Array  # block scales that differ
    blocks: jax.Array  # block scales compared
    difference: jax.Array  # squared difference of the dequantized values
    reference: jax.Array  # squared dequantized values of the rollout
    nan_blocks: jax.Array  # blocks quantized from a NaN, on either side

    @property
    def code_rate(self) -> jax.Array:
        """Share of codes that differ."""
        return self.codes / self.values

    @property
    def scale_rate(self) -> jax.Array:
        """Share of block scales that differ."""
        return self.scales / self.blocks

    @property
    def d_act(self) -> jax.Array:
        """Relative Frobenius distance of the dequantized values."""
        return jnp.sqrt(self.difference / self.reference)

    def total(self) -> "Mismatch":
        """The sums over all axes."""
        return jax.tree.map(jnp.sum, self)


def compare(ours: Guidance, rollout: Guidance, valid_BT: jax.Array) -> dict[str, Mismatch]:
    """The Mismatch [L] of each site, over tokens where valid_BT [B, T] is nonzero."""
    by_sequence = compare_sequences(ours, rollout, valid_BT)
    return jax.tree.map(lambda sums_LB: sums_LB.sum(axis=1), by_sequence)


def compare_sequences(
    ours: Guidance, rollout: Guidance, valid_BT: jax.Array
) -> dict[str, Mismatch]:
    """The Mismatch [L, B] of each site, over tokens where valid_BT [B, T] is nonzero."""
    return {
        site: _compare_site(ours.guides[site], rollout.guides[site], valid_BT)
        for site in rollout.guides
    }


def rows_restored(ours: Guidance, rollout: Guidance, valid_BT: jax.Array) -> jax.Array:
    """Share of rows (one token's at a site, K and V by head) whose hashes agree; shape ().

    Both sides in the encoding "hash"; over tokens where valid_BT [B, T] is nonzero.
    """
    equal, rows = 0, 0
    for site, guide in rollout.guides.items():
        same = jnp.all(ours.guides[site].bits == guide.bits, axis=-1)  # [L, B, T, ...]
        per_token = jnp.mean(same, axis=tuple(range(3, same.ndim)))
        equal += jnp.sum(per_token * valid_BT) * same[0, 0, 0].size
        rows += jnp.sum(valid_BT) * same.shape[0] * same[0, 0, 0].size
    return equal / rows


def add(mismatches: list[Mismatch]) -> Mismatch:
    """The sum of several of the same layers."""
    return jax.tree.map(lambda *sums: sum(sums), *mismatches)


def of_layers(sites: dict[str, Mismatch], present: SiteLayers, wanted: SiteLayers) -> Mismatch:
    """The sum over sites and layers of `wanted`, from the Mismatch of the sites of `present`.

    What `present` lacks is left out. Shape ().
    """
    total = jax.tree.map(jnp.zeros_like, next(iter(sites.values())).total())
    for site, layers in wanted:
        rows = [row for row, layer in enumerate(dict(present).get(site, ())) if layer in layers]
        if rows:
            picked = jax.tree.map(lambda a, rows=rows: a[np.array(rows)].sum(), sites[site])
            total = add([total, picked])
    return total


def from_nan(q: BlockScaled) -> jax.Array:
    """Which blocks [..., n/b] were quantized from a NaN (Inf saturates, method.md 3.3)."""
    return jnp.isnan(block_scaled.block_factor(q.scales, q.outer))


def _compare_site(ours: Guide, rollout: Guide, valid_BT: jax.Array) -> Mismatch:
    q, r = (BlockScaled(g.bits, g.scales, g.outer, g.fmt) for g in (ours, rollout))

    def count(a):  # [L, B, T, ...] -> [L, B], over valid tokens
        per_token = jnp.sum(a.astype(jnp.float32), axis=tuple(range(3, a.ndim)))
        return jnp.sum(per_token * valid_BT, axis=2)

    codes_differ = block_scaled.unpack(q) != block_scaled.unpack(r)
    scales_differ = q.scales.astype(jnp.float32) != r.scales.astype(jnp.float32)
    value, reference = block_scaled.dequantize(q), block_scaled.dequantize(r)
    return Mismatch(
        codes=count(codes_differ),
        values=count(jnp.ones_like(codes_differ)),
        scales=count(scales_differ),
        blocks=count(jnp.ones_like(scales_differ)),
        difference=count((value - reference) ** 2),
        reference=count(reference**2),
        nan_blocks=count(from_nan(q) | from_nan(r)),
    )
