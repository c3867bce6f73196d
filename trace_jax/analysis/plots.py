"""Figures drawn from run directories alone: one run, and methods side by side.

Everything is read from metrics.jsonl. The first evaluation of a run is taken as that of the policy
after the supervised warm-up, before any update by reinforcement learning.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trace_jax.analysis.run_directory import read_config, read_metrics

# Okabe and Ito's colours, told apart by colour-blind readers too; their yellow is too pale here.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#777777"

# A method has the same colour in every figure. What corrects another method has that one's colour,
# dashed (METHOD_DASHES). Methods that are not listed are grey or sky, in dashes of their own.
METHOD_COLORS = {
    "bf16": BLACK,
    "fp4_rollout": ORANGE,
    "qat": VERMILLION,
    "trace": BLUE,
    "trace_full": GREEN,
    "trace_syndrome": PURPLE,
    "quads": SKY,
    "qarl": VERMILLION,
    "tis": ORANGE,
    "icepop": ORANGE,
    "score_centering": ORANGE,
}
SOLID, DASHED, DOTTED, DASH_DOTTED = "-", (0, (4, 3)), (0, (1, 1.5)), (0, (6, 2, 1, 2))
METHOD_DASHES = {"qarl": DASHED, "tis": DASHED, "icepop": DOTTED, "score_centering": DASH_DOTTED}
OTHER_LOOKS = (
    (GREY, SOLID), (GREY, DASHED), (GREY, DOTTED), (GREY, DASH_DOTTED),
    (SKY, DASHED), (SKY, DOTTED), (SKY, DASH_DOTTED),
)  # fmt: skip

REWARD = ("Training reward", "mean over completions")
ACCURACY = ("Held-out accuracy", "share exactly right")
MISMATCH = ("Rollout against trainer", "|log-prob gap| (nats a token)")


def plot_run(workdir: str | Path) -> Path:
    """Draws WORKDIR/figures/run.png and returns its path: reward, held-out accuracy, mismatch.

    Raises:
      FileNotFoundError: there is no metrics.jsonl.
      ValueError: metrics.jsonl has no row.
    """
    workdir = Path(workdir)
    rows = _rows(workdir)
    figure, (reward, accuracy, mismatch) = _panels()

    steps, values = curve(rows, "reward/mean")
    window = _window(len(values))
    reward.plot(steps, values, color=SKY, linewidth=0.7, label="each step")
    if window > 1:
        reward.plot(steps, smooth(values, window), color=BLUE, label=f"mean of {window} steps")

    for name, label, color, marker in (
        ("eval/accuracy_fp4", "FP4", BLUE, "o"),
        ("eval/accuracy_bf16", "BF16", BLACK, "s"),
    ):
        steps, values = curve(rows, name)
        accuracy.plot(steps, values, color=color, marker=marker, markersize=2.5, label=label)
        if len(values):
            accuracy.axhline(values[0], color=color, linewidth=0.8, linestyle=DASHED)
    accuracy.plot([], [], color=GREY, linewidth=0.8, linestyle=DASHED, label="after warm-up")

    for name, label, color in (
        ("mismatch/logp_abs_max", "largest", ORANGE),
        ("mismatch/logp_abs_mean", "mean", BLUE),
    ):
        mismatch.plot(*_positive(curve(rows, name)), color=color, linewidth=1.0, label=label)

    for axes, text in zip((reward, accuracy, mismatch), (REWARD, ACCURACY, MISMATCH), strict=True):
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.24),
            ncols=3,
            frameon=False,
            fontsize=7,
            handlelength=1.4,
            columnspacing=1.0,
        )
        _finish(axes, *text)
    if (workdir / "config.json").exists():
        figure.suptitle(f"method: {read_config(workdir).get('method')}", fontsize=8)
    return _save(figure, workdir / "figures" / "run.png")


def plot_comparison(
    workdirs_by_method: Mapping[str, Sequence[str | Path]], out: str | Path
) -> Path:
    """Draws methods over each other into `out` (a .png or .pdf path) and returns its path.

    A method's runs, one a seed, are thin lines; the thick line is their median, as far as all of
    them have values. Reward and mismatch (mean over tokens) are running means over steps.

    Raises:
      FileNotFoundError: a run has no metrics.jsonl.
      ValueError: a method has no runs, or a run has no row.
    """
    figure, panels = _panels()
    names = ("reward/mean", "eval/accuracy_fp4", "mismatch/logp_abs_mean")
    others = iter(OTHER_LOOKS * len(workdirs_by_method))
    for method, workdirs in workdirs_by_method.items():
        if not workdirs:
            raise ValueError(f"method {method!r} has no runs; name a run directory or leave it out")
        runs = [_rows(workdir) for workdir in workdirs]
        color, dashes = look(method) if method in METHOD_COLORS else next(others)
        for axes, name in zip(panels, names, strict=True):
            curves = [curve(rows, name) for rows in runs]
            if name != "eval/accuracy_fp4":
                curves = [(steps, smooth(y, _window(len(y)))) for steps, y in curves]
            middle = median(curves)
            if name == "mismatch/logp_abs_mean":
                curves, middle = [_positive(points) for points in curves], _positive(middle)
            for points in curves:
                axes.plot(*points, color=color, linewidth=0.6, alpha=0.45)
            axes.plot(*middle, color=color, linestyle=dashes, linewidth=1.6, label=method)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=min(len(workdirs_by_method), 6),
        handlelength=3,
        frameon=False,
        fontsize=8,
    )
    fp4_accuracy = (f"{ACCURACY[0]}, FP4", ACCURACY[1])
    for axes, text in zip(panels, (REWARD, fp4_accuracy, MISMATCH), strict=True):
        _finish(axes, *text)
    return _save(figure, Path(out))


def look(method: str) -> tuple[str, str | tuple]:
    """(colour, dashes) of a listed method, as matplotlib takes them."""
    return METHOD_COLORS[method], METHOD_DASHES.get(method, SOLID)


def curve(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows' steps int [n] and values float64 [n] of one metric, where a row has it."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, int), np.array(values, float)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean over `window` values (odd), over fewer at the ends; float64 [n].

    Fewer values than `window` come back as they are.
    """
    if len(values) < window:
        return values
    ones = np.ones(window)
    present = np.convolve(np.ones_like(values), ones, "same")
    return np.convolve(values, ones, "same") / present


def median(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and median values where every one of `curves` (steps, values) has a value."""
    by_step = [dict(zip(*points, strict=True)) for points in curves]
    steps = sorted(set.intersection(*(set(values) for values in by_step)))
    return np.array(steps, int), np.array(
        [np.median([values[step] for values in by_step]) for step in steps], float
    )


def _rows(workdir: str | Path) -> list[dict[str, Any]]:
    rows = read_metrics(workdir)
    if not rows:
        raise ValueError(f"{workdir}/metrics.jsonl has no rows; let the run finish a step first")
    return rows


def _window(count: int) -> int:
    """An odd window of about a twentieth of `count` points."""
    return max(1, count // 40 * 2 + 1)


def _positive(points: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The points that a log axis can show, the others as gaps."""
    steps, values = points
    return steps, np.where(values > 0, values, np.nan)


def _panels() -> tuple[Figure, Sequence[Axes]]:
    """A figure as wide as a page's text: reward, accuracy and mismatch side by side."""
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True)
    panels[1].set_ylim(-0.03, 1.03)
    panels[2].set_yscale("log")
    return figure, panels


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.5)
    if not any(np.isfinite(np.asarray(line.get_ydata(), float)).any() for line in axes.lines):
        reason = "no value above 0" if axes.get_yscale() == "log" else "no values"
        axes.set(yscale="linear", yticks=[])
        axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", fontsize=8, color=GREY)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    return path
