"""What one program costs over another, in pairs of runs, and what a record holds, in bytes.

The two sides of a pair run one after the other, in turned order every other time, so that what
slows the machine for seconds slows both. Wall time counts the work of others on the machine too;
processor time of this process does not, and its ratios scatter less.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from trace_jax.guidance import encoding
from trace_jax.guidance.encoding import Guide
from trace_jax.guidance.record import Guidance
from trace_jax.models import architecture
from trace_jax.models.architecture import ModelConfig

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
SHORTEST = 0.4  # seconds of processor time that a run is made to last, by calling again

Program = Callable[[], object]  # returns the arrays that it is waited for


class Paired(NamedTuple):
    """Seconds a call of two programs, by clock: arrays [pairs]."""

    base: dict[str, np.ndarray]
    other: dict[str, np.ndarray]

    def ratio(self, clock: str) -> dict[str, float]:
        """Median, least and largest of other / base over the pairs."""
        ratios = self.other[clock] / self.base[clock]
        statistics = {"median": np.median, "min": np.min, "max": np.max}
        return {name: float(statistic(ratios)) for name, statistic in statistics.items()}

    def summary(self) -> dict[str, dict]:
        """By clock: the ratio, and the seconds of every run; fit for JSON."""
        return {
            clock: {
                "ratio": self.ratio(clock),
                "base_s": self.base[clock].tolist(),
                "other_s": self.other[clock].tolist(),
            }
            for clock in CLOCKS
        }


def measure(base: Program, others: Mapping[str, Program], pairs: int) -> dict[str, Paired]:
    """Each program timed against `base` in `pairs` pairs of runs, all compiled before them."""
    for program in (base, *others.values()):
        _run(program, calls=2)
    calls = max(1, round(SHORTEST / _run(base, calls=1)["cpu"]))
    runs = {name: ([], []) for name in others}
    for pair in range(pairs):
        for name, other in others.items():
            for side in ((0, 1), (1, 0))[pair % 2]:
                runs[name][side].append(_run((base, other)[side], calls))
    by_clock = lambda rows: {clock: np.array([row[clock] for row in rows]) for clock in CLOCKS}
    return {name: Paired(*map(by_clock, sides)) for name, sides in runs.items()}


def _run(program: Program, calls: int) -> dict[str, float]:
    """Seconds a call, by clock."""
    start = {name: clock() for name, clock in CLOCKS.items()}
    for _ in range(calls):
        jax.block_until_ready(program())
    return {name: (clock() - start[name]) / calls for name, clock in CLOCKS.items()}


def site_bytes(guidance: Guidance, cfg: ModelConfig) -> dict[str, dict[str, float]]:
    """By site: bytes of one token in one layer, as the arrays hold them and by the formula.

    Raises ValueError where the two differ.
    """
    sites = architecture.sites(cfg)
    found = {
        site: {
            "held": _held(guide),
            "formula": _formula(sites[site].rows, sites[site].width, guide),
        }
        for site, guide in guidance.guides.items()
    }
    for site, of in found.items():
        if of["held"] != of["formula"]:
            raise ValueError(f"the record of {site} takes {of['held']} bytes, not {of['formula']}")
    return found


def _held(guide: Guide) -> int:
    per_token = lambda a: a.dtype.itemsize * int(np.prod(a.shape[3:]))  # of [layers, B, T, ...]
    return sum(map(per_token, jax.tree.leaves(guide)))


def _formula(rows: int, width: int, guide: Guide) -> int:
    """Of `rows` rows a token. Source: method.md 1.11 (width * (b + 8 / block) / 8 a row)."""
    return rows * encoding.row_bytes(guide.encoding, width, guide.fmt)


def time_table(measured: Mapping[str, Paired], targets: Mapping[str, float]) -> str:
    """Markdown: median processor time of base and other, and the ratio by each clock."""
    lines = [
        "| measured | base, CPU ms | CPU ms | CPU ratio | wall ratio | target |",
        "|---|---|---|---|---|---|",
    ]
    for name, paired in measured.items():
        milliseconds = (f"{1e3 * np.median(side['cpu']):.1f}" for side in paired)
        ratios = (
            "{median:.3f} ({min:.3f}..{max:.3f})".format(**paired.ratio(clock)) for clock in CLOCKS
        )
        cells = (name, *milliseconds, *ratios, targets.get(name, ""))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def bytes_table(by_record: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Markdown: `site_bytes` of several records by name."""
    lines = ["| record | site | bytes a token and layer | by the formula |", "|---|---|---|---|"]
    for name, sites in by_record.items():
        for site, of in sites.items():
            lines.append(f"| {name} | {site} | {of['held']:g} | {of['formula']:g} |")
    return "\n".join(lines)
