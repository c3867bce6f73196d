"""Guidance: the rollout's record of its own rounding, as a pytree that travels with the tokens.

A Recording says what to keep (static); a Guidance holds it: for each site a Guide whose arrays have
leading axes [layers kept, sequences, tokens]. It is written by the sampling loop and read by
training. Which layers have a site, the model says; which of these are kept, the Recording.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.guidance import encoding as encodings
from trace_jax.guidance import policy
from trace_jax.guidance.encoding import Guide
from trace_jax.guidance.stacked import at_row, row_among

SiteLayers = tuple[tuple[str, tuple[int, ...]], ...]  # (site, its layers) in the order of sites


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a forward keeps of its own rounding. Static and hashable."""

    encoding: str
    layers: SiteLayers
    sequences: int | None = None  # keep only the first few of the batch (an audit); None: all

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites recorded."""
        return tuple(site for site, _ in self.layers)

    def encode(self, quantized: Mapping[str, BlockScaled | None]) -> dict[str, Guide]:
        """The Guides of one layer's quantized tensors, for those recorded and their sequences."""
        kept = {site: quantized[site] for site in self.sites if quantized.get(site) is not None}
        guides = {site: encodings.encode(q, self.encoding) for site, q in kept.items()}
        return jax.tree.map(lambda a: a[: self.sequences], guides)


LAYERS = {  # name -> [first, last) of n layers
    "all": lambda n: (0, n),
    "latter_half": lambda n: (n // 2, n),
    "first_half": lambda n: (0, n // 2),
    "latter_quarter": lambda n: (n - n // 4, n),
    "latter_eighth": lambda n: (n - n // 8, n),
}


def recording(
    encoding: str,
    patterns: tuple[str, ...],
    share: str,
    site_layers: Mapping[str, tuple[int, ...]],
    quantized: policy.Policy,
) -> Recording:
    """The Recording of the quantized sites that the patterns name, in the named share of layers.

    site_layers: the layers that have each site (`architecture.site_layers`). A site that has none
    in the share is left out. Raises ValueError for an unknown encoding or share, an encoding that
    does not suit a site's format, a share in which no site is left, and a pattern that matches no
    quantized site.
    """
    encodings.check_encoding(encoding)
    if share not in LAYERS:
        raise ValueError(f"guidance.layers={share!r}: choose one of {sorted(LAYERS)}")
    depth = 1 + max(max(layers) for layers in site_layers.values())
    kept = range(*LAYERS[share](depth))
    sites = policy.matching(patterns, quantized.sites)
    for site in sites:
        encodings.check_encoding(encoding, dict(quantized.formats + quantized.observed)[site])
    layers = {site: tuple(i for i in site_layers[site] if i in kept) for site in sites}
    found = tuple((site, kept) for site, kept in layers.items() if kept)
    if not found:
        raise ValueError(
            f"guidance.layers={share!r} of {depth} layers has none of {', '.join(sites)}; "
            "choose 'all'"
        )
    return Recording(encoding, found)


def checking(recording: Recording) -> Recording:
    """The Recording of 16 bits of each row that `recording` guides: was it restored exactly?"""
    return dataclasses.replace(recording, encoding=encodings.HASH)


class LayerGuide(NamedTuple):
    """The Guide of one site in one layer, and whether it is that layer's own."""

    guide: Guide
    covers: jax.Array | bool  # False: the layer was not recorded, and the guide is another's


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guidance:
    """Recorded rounding of a batch: Guides by site, arrays [layers kept, B, T, ...]."""

    guides: dict[str, Guide]
    layers: SiteLayers = dataclasses.field(metadata=dict(static=True))

    def at_layer(self, layer: jax.Array, among: tuple[int, ...]) -> dict[str, LayerGuide]:
        """The guides of a layer, known to be one of `among`, for the sites recorded in any of them.

        `covers` is the Python value True where all of `among` are recorded, so that no branch is
        compiled.
        """
        found = {}
        for site, kept in self.layers:
            shared = set(among) & set(kept)
            if shared:
                guide = at_row(self.guides[site], row_among(kept, layer))
                covers = shared == set(among) or jnp.isin(layer, jnp.asarray(kept))
                found[site] = LayerGuide(guide, covers)
        return found


def keep(
    record: Recording, guides: dict[str, Guide], present: Mapping[str, tuple[int, ...]]
) -> Guidance:
    """The Guidance of what is recorded, from Guides [layers, B, T, ...] of the layers `present`.

    Raises ValueError where what is recorded of a site does not lie side by side among them.
    """

    def kept(site, layers):
        rows = [present[site].index(layer) for layer in layers]
        if rows != list(range(rows[0], rows[0] + len(rows))):
            raise ValueError(f"{site}: layers {layers} are not neighbours among {present[site]}")
        return jax.tree.map(lambda a: a[rows[0] : rows[-1] + 1], guides[site])

    return Guidance({site: kept(site, layers) for site, layers in record.layers}, record.layers)


def bytes_per_token(guidance: Guidance) -> float:
    """Bytes that the record takes for one token of one sequence."""
    leaves = jax.tree.leaves(guidance.guides)
    _, sequences, tokens = leaves[0].shape[:3]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / (sequences * tokens)


def reduce(full: Guidance, recording: Recording) -> Guidance:
    """What `recording` would have kept of a rollout whose full codes are known.

    full: Guidance in the encoding "codes" that holds the recording's sites and layers.
    """

    def encode(guide: Guide) -> Guide:
        q = BlockScaled(guide.bits, guide.scales, guide.outer, guide.fmt)
        return encodings.encode(q, recording.encoding)

    kept = keep(recording, full.guides, dict(full.layers))
    first = jax.tree.map(lambda a: a[:, : recording.sequences], kept.guides)
    return Guidance({site: encode(guide) for site, guide in first.items()}, recording.layers)
