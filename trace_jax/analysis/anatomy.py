"""Where in the model and in the sequence a gap arises, how it grows, and with which engine.

Every function reads one Bench (analysis/attribution.py) and returns plain numbers. Methods are
named by the sources that they leave on. Letters: B sequences, T tokens, L layers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.analysis import comparison
from trace_jax.analysis.attribution import Bench, Sources, engine, quieted
from trace_jax.analysis.comparison import Comparison
from trace_jax.guidance import mismatch
from trace_jax.parallel.mesh import batch_shares
from trace_jax.rollout.sampler import Rollout

TRACE: Sources = frozenset()  # low bits and scales of all layers, routes replayed
QAT: Sources = frozenset(("scales", "codes", "routing"))
FP4_ROLLOUT: Sources = QAT | {"weights", "activations", "kv cache"}
METHODS = {"fp4_rollout": FP4_ROLLOUT, "qat": QAT, "trace, all layers": TRACE}
PARTS = 4  # of the batch, for an engine that works on a smaller one


def engines(bench: Bench) -> list[dict]:
    """How far QAT is from its rollout under each pair of engines that one machine can show."""
    none = comparison.engine(bench.settings)
    bfloat16 = comparison.engine(bench.settings, bfloat16=True)
    seen = {"measured: decode against full forward": bench.compare(QAT, none)}
    if bench.settings.rollout.batch % (PARTS * batch_shares()) == 0:
        size = bench.settings.rollout.batch // PARTS
        parts = [sequences(bench.rollout, slice(i, i + size)) for i in range(0, PARTS * size, size)]
        found = [bench._replace(rollout=part).compare(QAT, none) for part in parts]
        seen[f"measured: the same, {size} sequences at a time"] = joined(found)
    seen["measured: BF16 activations"] = bench.compare(QAT, bfloat16)
    seen[engine(bench.settings)[0]] = bench.compare(QAT, bench.engine)
    return [{"engine": name} | summary(bench, found) for name, found in seen.items()]


def summary(bench: Bench, seen: Comparison) -> dict:
    """Rates over all sites and layers, and the mean gap of a sequence (nats)."""
    total = mismatch.add([m.total() for m in seen.sites.values()])
    rates = {name: float(getattr(total, name)) for name in ("code_rate", "scale_rate", "d_act")}
    return {"gap": float(seen.gap_B(np.asarray(bench.rollout.mask_BT)).mean())} | rates


def sequences(rollout: Rollout, rows: slice) -> Rollout:
    """Some sequences of a rollout."""
    by_sequence = ("tokens_BT", "prompt_length_B", "length_B", "logp_BT", "log_mass_BT")
    by_layer = ("routes_LBTA", "guidance", "audit")
    take = lambda names, at: {
        name: jax.tree.map(lambda a: a[at], getattr(rollout, name)) for name in names
    }
    return dataclasses.replace(
        rollout, **take(by_sequence, rows), **take(by_layer, (slice(None), rows))
    )


def joined(parts: list[Comparison]) -> Comparison:
    """One Comparison of sequences that were compared apart; metrics stay with the parts."""
    sites = jax.tree.map(lambda *a: np.concatenate(a, axis=1), *(part.sites for part in parts))
    return Comparison({}, np.concatenate([part.log_ratio_BT for part in parts]), sites)


def by_site_and_layer(bench: Bench) -> dict[str, list[float | None]]:
    """Share of codes that differ under QAT and the other engine, [L] by site.

    None where a layer has no such site.
    """
    seen = bench.compare(QAT | {"kernels"})
    found = {}
    for site, layers in bench.rollout.audit.layers:
        sums = jax.tree.map(lambda a: a.sum(axis=1), seen.sites[site])
        rate = dict(zip(layers, sums.code_rate.tolist(), strict=True))
        found[site] = [rate.get(layer) for layer in range(bench.layers)]
    return found


def by_position(bench: Bench) -> dict:
    """Mean |log-prob gap| (nats) at each place of the completion, by method, and how many have it.

    The other engine's kernels are on.
    """
    mask_BT, start_B = jax.device_get((bench.rollout.mask_BT, bench.rollout.prompt_length_B))
    place_BT = np.where(mask_BT > 0, np.arange(mask_BT.shape[1]) - start_B[:, None], -1)
    here = [place_BT == place for place in range(place_BT.max() + 1)]
    gaps = {}
    for name, sources in METHODS.items():
        gap_BT = np.abs(bench.compare(sources | {"kernels"}).log_ratio_BT)
        gaps[name] = [float(gap_BT[at].mean()) for at in here]
    return {"sequences": [int(at.sum()) for at in here], "gap": gaps}


def growth(bench: Bench) -> list[dict]:
    """Code mismatch and D_act of every layer when the other engine runs one layer only.

    Each with QAT, and with all layers guided.
    """
    rows = []
    for name in ("qat", "trace, all layers"):
        for noisy in range(bench.layers):
            only = quieted(bench.engine, jnp.arange(bench.layers) == noisy)
            seen = bench.compare(METHODS[name], only)
            layers = [of_layer(bench, seen, layer) for layer in range(bench.layers)]
            rows.append({
                "method": name,
                "noisy_layer": noisy,
                "code_rate": [float(m.code_rate) for m in layers],
                "d_act": [float(m.d_act) for m in layers],
            })  # fmt: skip
    return rows


def of_layer(bench: Bench, seen: Comparison, layer: int) -> mismatch.Mismatch:
    """The Mismatch of one layer, over its sites."""
    wanted = tuple((site, (layer,)) for site in seen.sites)
    return mismatch.of_layers(seen.sites, bench.rollout.audit.layers, wanted)
