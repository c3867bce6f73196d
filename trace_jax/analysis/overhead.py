"""What one program costs over another, measured in pairs on a machine that others use too.

The two sides of a pair run one after the other, in turned order every other time, so that what slows
the machine for seconds slows both. Wall time counts the others' work as well; processor time of this
process does not, and its ratios scatter less.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from trace_jax.formats.block_scaled import BLOCK
from trace_jax.guidance import quantizer
from trace_jax.guidance.quantizer import Guide

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SHORTEST = 0.25  # seconds of processor time that one measurement takes at least


class Paired(NamedTuple):
    """Seconds a call of two programs, [pairs]; keys "wall" and "cpu"."""

    base: dict[str, np.ndarray]
    other: dict[str, np.ndarray]

    def ratio(self, clock: str) -> dict[str, float]:
        """Median, least and largest of other / base over the pairs."""
        ratios = self.other[clock] / self.base[clock]
        return {
            name: float(of(ratios)) for name, of in dict(median=np.median, min=min, max=max).items()
        }


def measure(
    base: Callable[[], object], others: Mapping[str, Callable[[], object]], pairs: int
) -> dict[str, Paired]:
    """Each program timed against `base`, `pairs` times. A program returns the arrays it waits for."""
    _seconds(base, 1), _seconds(base, 1)  # compiles, then warms
    calls = max(1, round(SHORTEST / _seconds(base, 1)["cpu"]))
    for other in others.values():
        _seconds(other, 2)
    times = {name: ([], []) for name in others}
    for pair in range(pairs):
        for name, other in others.items():
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            for side in order:
                times[name][side].append(_seconds((base, other)[side], calls))
    stack = lambda rows: {clock: np.array([row[clock] for row in rows]) for clock in CLOCKS}
    return {name: Paired(stack(ours), stack(theirs)) for name, (ours, theirs) in times.items()}


def _seconds(program: Callable[[], object], calls: int) -> dict[str, float]:
    """Seconds a call by each clock."""
    start = {name: clock() for name, clock in CLOCKS.items()}
    for _ in range(calls):
        jax.block_until_ready(program())
    return {name: (clock() - start[name]) / calls for name, clock in CLOCKS.items()}


def guide_bytes(guide: Guide) -> int:
    """Bytes of one token in one layer, as the arrays [layers, B, T, ...] of a record hold it."""
    return sum(
        leaf.dtype.itemsize * int(np.prod(leaf.shape[3:], dtype=int))
        for leaf in jax.tree.leaves(guide)
    )


def formula_bytes(width: int, rows: int, fmt: str, encoding: str) -> float:
    """Bytes of one token in one layer: rows * (width * (b + 8 / block) / 8 + 4).

    b bits a value and 8 a block scale; NVFP4 has 4 bytes more for the outer scale of each row (one a
    head for K and V, one a chosen expert for their hidden rows). Source: method.md 1.11.
    """
    bits = quantizer.BITS[encoding] + 8 / BLOCK[fmt]
    return rows * (width * bits / 8 + (4 if fmt == "nvfp4" else 0))


def table(measured: Mapping[str, Paired], targets: Mapping[str, float]) -> str:
    """Markdown: times of base and other, and the ratio of each pair, as median (least..largest)."""
    lines = [
        "| | base CPU ms | CPU ms | CPU ratio | wall ratio | target |",
        "|---|---|---|---|---|---|",
    ]
    for name, paired in measured.items():
        base, other = (1e3 * np.median(side["cpu"]) for side in paired)
        ratios = (
            "{median:.3f} ({min:.3f}..{max:.3f})".format(**paired.ratio(clock))
            for clock in ("cpu", "wall")
        )
        target = f"{targets[name]:.2f}" if name in targets else ""
        lines.append(f"| {name} | {base:.1f} | {other:.1f} | {' | '.join(ratios)} | {target} |")
    return "\n".join(lines)


def bytes_table(record_bytes: Mapping[str, Mapping[str, tuple[int, float]]]) -> str:
    """Markdown: bytes of a token and layer by encoding and site, as held and by the formula."""
    lines = ["| record | site | bytes held | by the formula |", "|---|---|---|---|"]
    for encoding, sites in record_bytes.items():
        for site, (held, formula) in sites.items():
            lines.append(f"| {encoding} | {site} | {held} | {formula:g} |")
    return "\n".join(lines)


def summary(paired: Paired) -> dict[str, object]:
    """What JSON holds of a Paired: ratios, and the seconds of every run."""
    return {
        clock: {
            "ratio": paired.ratio(clock),
            "base_s": paired.base[clock].tolist(),
            "other_s": paired.other[clock].tolist(),
        }
        for clock in CLOCKS
    }
