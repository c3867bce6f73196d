"""What is quantized: an ordered list of rules, resolved once to a format for each site.

A site is one quantized tensor of a layer together with the weights it multiplies:

    attention/in   normed input of the attention projections   with weights q, k, v
    attention/k    K after K-norm and RoPE, as cached           (no weight)
    attention/v    V, as cached                                 (no weight)
    attention/out  concatenated heads                           with weight o
    experts/in     normed input of the routed experts           with weights gate and up
    experts/mid    silu(gate) * up of each chosen expert        with weight down

Everything else (router, norms, embedding, head) stays in the compute dtype.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable

from trace_jax.formats.block_scaled import BLOCK
from trace_jax.formats.quantize import check_format

SITES = (
    "attention/in",
    "attention/k",
    "attention/v",
    "attention/out",
    "experts/in",
    "experts/mid",
)
WEIGHT_SITE = {  # a layer's weights by name -> the site whose input they multiply
    "q": "attention/in",
    "k": "attention/in",
    "v": "attention/in",
    "o": "attention/out",
    "gate_up": "experts/in",
    "down": "experts/mid",
}
UNQUANTIZED = "bf16"

Rules = Iterable[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Policy:
    """The format of every quantized site; sites not named stay as they are. Static, hashable.

    An `observed` site stays as it is too, but the codes that its activation would take can be
    recorded: that is how a BF16 forward is compared with an FP4 one.
    """

    formats: tuple[tuple[str, str], ...] = ()
    observed: tuple[tuple[str, str], ...] = ()

    def fmt(self, site: str) -> str | None:
        """The format of a site, or None where it is not quantized."""
        return dict(self.formats).get(site)

    def weight_fmt(self, weight: str) -> str | None:
        """The format of a weight by its name, or None where it stays in the compute dtype."""
        return self.fmt(WEIGHT_SITE.get(weight, ""))

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that have codes, quantized or observed."""
        return tuple(site for site, _ in self.formats + self.observed)


NOTHING = Policy()


def matching(patterns: Iterable[str], among: Iterable[str] = SITES) -> tuple[str, ...]:
    """The sites, in the order of `among`, that a pattern names ('*' matches anything).

    Raises ValueError for a pattern that matches nothing, with the closest site.
    """
    among = tuple(among)
    patterns = tuple(patterns)
    for pattern in patterns:
        if not fnmatch.filter(among, pattern):
            close = difflib.get_close_matches(pattern, among, n=1, cutoff=0) or among or ("none",)
            raise ValueError(
                f"site pattern {pattern!r} matches nothing; sites: {', '.join(among) or 'none'}; "
                f"closest: {close[0]!r}"
            )
    return tuple(site for site in among if any(fnmatch.fnmatch(site, p) for p in patterns))


def resolve(rules: Rules) -> Policy:
    """The Policy of an ordered list of (site pattern, format or 'bf16'); the first match decides.

    Raises ValueError for a pattern that matches nothing or an unknown format.
    """
    chosen: dict[str, str] = {}
    for pattern, fmt in rules:
        if fmt != UNQUANTIZED:
            check_format(fmt)
        for site in matching([pattern]):
            chosen.setdefault(site, fmt)
    return Policy(tuple((s, chosen[s]) for s in SITES if chosen.get(s, UNQUANTIZED) != UNQUANTIZED))


def block(fmt: str) -> int:
    """Values that share a block scale in a format."""
    return BLOCK[check_format(fmt)]
