"""Guidance: the rollout's record of its own rounding, as a pytree that travels with the tokens.

A Recording says what to keep (static); a Guidance holds it: for each site a Guide whose arrays have
leading axes [layers, sequences, tokens]. It is written by the sampling loop and read by training.
"""

import dataclasses

import jax
import jax.numpy as jnp

from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.guidance import policy, quantizer
from trace_jax.guidance.quantizer import Guide


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a forward keeps of its own rounding. Static and hashable."""

    encoding: str
    sites: tuple[str, ...]
    first_layer: int
    last_layer: int  # exclusive
    sequences: int | None = None  # keep only the first few of the batch (an audit); None: all

    def encode(self, quantized: dict[str, BlockScaled]) -> dict[str, Guide]:
        """The Guides of one layer's quantized tensors, for the recorded sites and sequences."""
        guides = {site: quantizer.encode(quantized[site], self.encoding) for site in self.sites}
        return jax.tree.map(lambda a: a[: self.sequences], guides)


LAYERS = {  # name -> [first, last) of n layers
    "all": lambda n: (0, n),
    "latter_half": lambda n: (n // 2, n),
    "first_half": lambda n: (0, n // 2),
    "latter_quarter": lambda n: (n - n // 4, n),
    "latter_eighth": lambda n: (n - n // 8, n),
}


def recording(
    encoding: str, patterns: tuple[str, ...], layers: str, num_layers: int, quantized: policy.Policy
) -> Recording:
    """The Recording of the quantized sites that the patterns name, in the named share of layers.

    Raises ValueError for an unknown encoding or share, a share that is empty at this depth, and a
    pattern that matches no quantized site.
    """
    quantizer.check_encoding(encoding)
    if layers not in LAYERS:
        raise ValueError(f"guidance.layers={layers!r}: choose one of {sorted(LAYERS)}")
    first, last = LAYERS[layers](num_layers)
    if first == last:
        raise ValueError(f"guidance.layers={layers!r} of {num_layers} layers is none; choose 'all'")
    return Recording(encoding, policy.matching(patterns, quantized.sites), first, last)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guidance:
    """Recorded rounding of a batch: Guides by site, arrays [layers kept, B, T, ...]."""

    guides: dict[str, Guide]
    first_layer: int = dataclasses.field(metadata=dict(static=True))
    last_layer: int = dataclasses.field(metadata=dict(static=True))

    def at_layer(self, layer: jax.Array) -> dict[str, Guide]:
        """The Guides [B, T, ...] of a layer (clamped to the recorded ones)."""
        kept = self.last_layer - self.first_layer
        index = jnp.clip(layer - self.first_layer, 0, kept - 1)
        pick = lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False)
        return jax.tree.map(pick, self.guides)

    def covers(self, layer: jax.Array, num_layers: int) -> jax.Array | bool:
        """Whether a layer is recorded; the Python value True where every layer is."""
        if (self.first_layer, self.last_layer) == (0, num_layers):
            return True
        return (layer >= self.first_layer) & (layer < self.last_layer)


def bytes_per_token(guidance: Guidance) -> float:
    """Bytes that the record takes for one token of one sequence."""
    leaves = jax.tree.leaves(guidance.guides)
    _, sequences, tokens = leaves[0].shape[:3]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / (sequences * tokens)


def reduce(full: Guidance, recording: Recording) -> Guidance:
    """What `recording` would have kept of a rollout whose full codes are known.

    full: Guidance in the encoding "codes" that holds the recording's sites and layers.
    """

    def one(guide: Guide) -> Guide:
        q = BlockScaled(guide.bits, guide.scales, guide.outer, guide.fmt)
        return quantizer.encode(q, recording.encoding)

    layers = slice(
        recording.first_layer - full.first_layer, recording.last_layer - full.first_layer
    )
    kept = {site: full.guides[site] for site in recording.sites}
    kept = jax.tree.map(lambda a: a[layers, : recording.sequences], kept)
    return Guidance(
        {site: one(guide) for site, guide in kept.items()},
        recording.first_layer,
        recording.last_layer,
    )
