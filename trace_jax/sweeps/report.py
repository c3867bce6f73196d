"""The report of a sweep, rebuilt from its run directories alone: table, figures, what failed.

Runs that differ in their seed only are one group. A group's numbers are means over its done runs,
with the half width of Student's 95% interval of that mean (needs two runs); the seeds themselves
are in report.json and in the figure.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from trace_jax.analysis import plots
from trace_jax.analysis.run_directory import RunDirectory, read_summary
from trace_jax.sweeps.runs import Run

BEFORE, AFTER = "before/accuracy_fp4", "after/accuracy_fp4"
COLUMNS = (  # heading, key of a run's summary, key to subtract
    ("FP4 before", BEFORE, None),
    ("FP4 after", AFTER, None),
    ("gain", AFTER, BEFORE),
    ("BF16 after", "after/accuracy_bf16", None),
    ("reward", "mean/reward/mean", None),
    ("codes that differ", "mean/mismatch/code_rate", None),
    ("mean gap (nats)", "mean/mismatch/logp_abs_mean", None),
    ("seconds", "seconds", None),
)


class Interval(NamedTuple):
    """A mean over runs."""

    mean: float
    half_width: float  # of its 95% interval; NaN for a single run

    def __str__(self) -> str:
        spread = "" if np.isnan(self.half_width) else f" ± {self.half_width:.2g}"
        return f"{self.mean:.3g}{spread}"


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent values and the half width of Student's 95% interval for it."""
    count = len(values)
    if count < 2:
        return Interval(float(np.mean(values)), float("nan"))
    error = np.std(values, ddof=1) / np.sqrt(count)
    return Interval(float(np.mean(values)), float(stats.t.ppf(0.975, count - 1) * error))


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by group, in the sweep's order."""
    groups = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return groups


def gather(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A plain dict for each run: name, overrides, state, and its summary or its error."""
    rows = []
    for run in runs:
        row = dict(name=run.name, group=run.group, overrides=dict(run.varied), state=run.state)
        if run.state == "done":
            row["summary"] = read_summary(run.workdir)
        elif run.state == "failed":
            row["error"] = run.error
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A markdown table, a line a group; "-" where no done run of it has the number."""
    lines = [["runs", "done", *(heading for heading, _, _ in COLUMNS)]]
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        done = [row["summary"] for row in own if row["state"] == "done"]
        cells = [group, f"{len(done)} of {len(own)}"]
        for _, key, less in COLUMNS:
            values = [one[key] - (one[less] if less else 0) for one in done if one[key] is not None]
            cells.append(str(interval(values)) if values else "-")
        lines.append(cells)
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def unfinished(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each run that is not done, with the error of a failed one."""
    return "\n".join(
        f"- {row['state']}: `{row['name']}`" + (f": {row['error']}" if "error" in row else "")
        for row in rows
        if row["state"] != "done"
    )


def plot_gains(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Draws FP4 accuracy before and after of every done run, a line a group, into `out`."""
    done = [row for row in rows if row["state"] == "done"]
    groups = list(dict.fromkeys(row["group"] for row in done))
    figure = Figure(figsize=(5.0, 0.9 + 0.32 * len(groups)), layout="constrained")
    axes = figure.subplots()
    for place, group in enumerate(groups):
        own = [row["summary"] for row in done if row["group"] == group]
        before, after = (np.array([one[key] for one in own]) for key in (BEFORE, AFTER))
        axes.plot(before, np.full(len(own), place), "o", color=plots.GREY, fillstyle="none")
        axes.plot(after, np.full(len(own), place), "o", color=plots.BLUE, alpha=0.6)
        axes.plot(after.mean(), place, "|", color=plots.BLACK, markersize=14)
    for style, text in (("none", "after warm-up"), ("full", "after RL, each seed")):
        color = plots.GREY if style == "none" else plots.BLUE
        axes.plot([], [], "o", color=color, fillstyle=style, label=text)
    axes.plot([], [], "|", color=plots.BLACK, markersize=10, label="mean after RL")
    axes.set_yticks(range(len(groups)), [group.removeprefix("method=") for group in groups])
    axes.invert_yaxis()
    axes.set_xlabel("share exactly right", fontsize=8)
    axes.set_title("Held-out accuracy, deployed in FP4", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.5, axis="x")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=200)
    return out


def write(runs: Sequence[Run], root: Path) -> str:
    """Writes report.md, report.json and figures/ into `root`; returns the text of report.md.

    Figures need a done run; without any there are none.
    """
    rows = gather(runs)
    text = f"# Sweep\n\n{table(rows)}\n"
    if any(row["state"] == "done" for row in rows):
        done = {
            group: [run.workdir for run in own if run.state == "done"]
            for group, own in grouped(runs).items()
        }
        shown = {
            group.removeprefix("method="): workdirs for group, workdirs in done.items() if workdirs
        }
        plots.plot_comparison(shown, root / "figures" / "curves.png")
        plot_gains(rows, root / "figures" / "accuracy.png")
        text += "\n![accuracy before and after](figures/accuracy.png)\n"
        text += "\n![reward, accuracy and gap over steps](figures/curves.png)\n"
    if unfinished(rows):
        text += f"\nNot done:\n\n{unfinished(rows)}\n"
    with RunDirectory(root) as directory:
        directory.write_json("report.json", rows)
    (root / "report.md").write_text(text)
    return text
