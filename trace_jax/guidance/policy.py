"""What is quantized: an ordered list of rules, resolved once to a format for each site of a model.

A site is one quantized tensor of a layer together with the weights it multiplies:

    attention/in       normed input of the attention projections  with weights q, k, v
    attention/k        K after K-norm and RoPE, as cached          (no weight)
    attention/v        V, as cached                                (no weight)
    attention/out      concatenated heads, gated where they are    with weight o
    delta_net/in       normed input of the DeltaNet projections    with weights qkv and z
    delta_net/state    the recurrent state after each token        (no weight; an experiment)
    delta_net/out      normed and gated heads                      with weight out
    experts/in         normed input of the routed experts          with weights gate and up
    experts/mid        silu(gate) * up of each chosen expert       with weight down
    shared_expert/in, shared_expert/mid, mlp/in, mlp/mid           the same, of the dense blocks
    head/in            the last norm's output                      with the head

Which of them a model has, its architecture says (models/architecture.py). Everything else (router,
gates, norms, convolutions, embedding) stays as it is. A pattern never reaches the sites of BY_NAME.

A rule gives a site one format, for its tensor and the weights alike, or names two of them (PAIRS).
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable

from trace_jax.formats.block_scaled import FORMATS
from trace_jax.formats.quantize import check_format

SITES = (
    "attention/in",
    "attention/k",
    "attention/v",
    "attention/out",
    "delta_net/in",
    "delta_net/state",
    "delta_net/out",
    "experts/in",
    "experts/mid",
    "shared_expert/in",
    "shared_expert/mid",
    "mlp/in",
    "mlp/mid",
    "head/in",
)
STATE = "delta_net/state"
BY_NAME = (STATE, "head/in")
WEIGHT_SITE = {  # a weight, "module/name" -> the site whose input it multiplies
    "attention/q": "attention/in",
    "attention/k": "attention/in",
    "attention/v": "attention/in",
    "attention/o": "attention/out",
    "delta_net/qkv": "delta_net/in",
    "delta_net/z": "delta_net/in",
    "delta_net/out": "delta_net/out",
    "experts/gate_up": "experts/in",
    "experts/down": "experts/mid",
    "shared_expert/gate_up": "shared_expert/in",
    "shared_expert/down": "shared_expert/mid",
    "mlp/gate_up": "mlp/in",
    "mlp/down": "mlp/mid",
    "head": "head/in",
}
UNQUANTIZED = "bf16"
# A rule's name for two formats: that of weights, and of what no weight multiplies (K, V, state);
# and that of the activations that weights multiply. Source: TRACE table 4.
PAIRS = {"mxfp4_w4a8": ("mxfp4", "mxfp8")}
NAMES = (*FORMATS, *PAIRS, UNQUANTIZED)  # what a rule can give a site

Rules = Iterable[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is quantized, and in which format. Static, hashable; what is not named stays as it is.

    An `observed` site stays as it is too, but the codes that its activation would take can be
    recorded: that is how a BF16 forward is compared with an FP4 one.
    """

    formats: tuple[tuple[str, str], ...] = ()  # (site, format) of activations
    weights: tuple[tuple[str, str], ...] = ()  # (site, format) of the weights that multiply them
    observed: tuple[tuple[str, str], ...] = ()  # (site, format) of activations left as they are
    residual: float = (
        0.0  # share of an activation's channels whose rounding error is multiplied too
    )

    def fmt(self, site: str) -> str | None:
        """The format of a site, or None where it is not quantized."""
        return dict(self.formats).get(site)

    def weight_fmt(self, weight: str) -> str | None:
        """The format of a weight (a key of WEIGHT_SITE), or None where it is not quantized."""
        return dict(self.weights).get(WEIGHT_SITE.get(weight, ""))

    def residual_share(self, site: str) -> float:
        """The share of a site's channels that have a residual (guidance/quantizer.py).

        None has one where no weight multiplies the site: K, V, state.
        """
        return self.residual if site in WEIGHT_SITE.values() else 0.0

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites whose codes can be recorded, quantized or observed: all but the state."""
        return tuple(site for site, _ in self.formats + self.observed if site != STATE)

    def only(self, *, weights: bool, sites: Iterable[str]) -> "Policy":
        """This policy with its weights or without, and activations quantized at `sites` only.

        The other sites are observed.
        """
        sites = set(sites)
        kept = tuple(pair for pair in self.formats if pair[0] in sites)
        left = tuple(pair for pair in self.formats if pair[0] not in sites)
        weights = self.weights if weights else ()
        return Policy(kept, weights, self.observed + left, self.residual)


NOTHING = Policy()


def matching(patterns: Iterable[str], among: Iterable[str]) -> tuple[str, ...]:
    """The sites, in the order of `among`, that a pattern names ('*' matches anything).

    Raises ValueError for a pattern that matches nothing, with the closest site.
    """
    among, patterns = tuple(among), tuple(patterns)

    def match(site, pattern):
        return site == pattern or (site not in BY_NAME and fnmatch.fnmatchcase(site, pattern))

    for pattern in patterns:
        if not any(match(site, pattern) for site in among):
            close = difflib.get_close_matches(pattern, among, n=1, cutoff=0) or among or ("none",)
            raise ValueError(
                f"site pattern {pattern!r} matches nothing; sites: {', '.join(among) or 'none'}; "
                f"closest: {close[0]!r}"
            )
    return tuple(site for site in among if any(match(site, pattern) for pattern in patterns))


def resolve(rules: Rules, among: Iterable[str]) -> Policy:
    """The Policy of an ordered list of (site pattern, name); the first match decides.

    A name is that of a format, of two (PAIRS), or 'bf16'. among: the sites that the model has
    (`architecture.sites`). Raises ValueError for a pattern that matches none of them, or an unknown
    name.
    """
    among = tuple(among)
    chosen: dict[str, str] = {}
    for pattern, name in rules:
        if name not in NAMES:
            raise ValueError(f"unknown format {name!r}: choose one of {sorted(NAMES)}")
        for site in matching([pattern], among):
            chosen.setdefault(site, name)
    kept = {site: chosen[site] for site in among if chosen.get(site, UNQUANTIZED) != UNQUANTIZED}
    pairs = {site: PAIRS.get(name, (name, name)) for site, name in kept.items()}
    multiplied = {site: pair for site, pair in pairs.items() if site in WEIGHT_SITE.values()}
    return Policy(
        tuple((site, pair[site in multiplied]) for site, pair in pairs.items()),
        tuple((site, pair[0]) for site, pair in multiplied.items()),
    )


def block(fmt: str) -> int:
    """Values that share a block scale in a format."""
    return FORMATS[check_format(fmt)].block
