"""The rows of `policy_change.measure` as tables and a figure; of several seeds, if they are joined.

A cell is the mean over seeds (and draws of noise) of one view's number for one move of the weights.
"""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trace_jax.analysis import policy_change as change
from trace_jax.analysis.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION

VIEWS = (
    change.LOW_BIT, change.LATTER_HALF, change.CODES, change.UNGUIDED, change.UNGUIDED_REPLAY,
    change.FP4, change.FP4_MEAN, change.BF16, change.FLOAT32,
)  # fmt: skip
STYLE = {  # colour and marker of a view
    change.FP4: (VERMILLION, "s"),
    change.FP4_MEAN: (ORANGE, "D"),
    change.UNGUIDED: (PURPLE, "v"),
    change.LATTER_HALF: (SKY, "<"),
    change.LOW_BIT: (BLUE, "o"),
    change.CODES: (GREEN, "^"),
    change.BF16: (BLACK, "x"),
    change.FLOAT32: (GREY, "+"),
}
ANSWERS = {  # column -> (view, or None for the one trained with, field)
    "own on FP4": (None, "fp4"),
    "own on FP4 mean": (None, "mean"),
    "own on BF16": (None, "bf16"),
    "FP4 on its mean": (change.FP4, "mean"),
    "FP4 on BF16": (change.FP4, "bf16"),
    "FP4 mean on BF16": (change.FP4_MEAN, "bf16"),
}


def own_view(trained: str) -> str:
    """The view of a trainer's later updates."""
    return change.TRAINED[trained][1]


def moves(rows: Iterable[dict], moved_by: str) -> list[tuple]:
    """The moves (trained, learning rate, amount) of one kind, in the order they were made."""
    keys = [_move(row) for row in rows if row["moved_by"] == moved_by]
    return list(dict.fromkeys(keys))


def average(rows: list[dict], moved_by: str, move: tuple, view: str, field: str) -> float | None:
    """The mean of one field over all rows of a move and view that have it, or None."""
    found = [
        row[field]
        for row in rows
        if row["moved_by"] == moved_by and row["view"] == view and _move(row) == move
    ]
    found = [value for value in found if value is not None]
    return float(np.mean(found)) if found else None


def _move(row: dict) -> tuple:
    return row["trained"], row.get("learning_rate"), row["amount"]


def markdown(rows: list[dict]) -> str:
    """The tables, each with its heading: noise, updates, staleness."""
    parts = ["Mean |log ratio| in nats, new minus old (in brackets the share beyond the clip).", ""]
    parts += ["**Weights moved by noise**, of this share of their rms", "", seen(rows, "noise"), ""]
    for moved_by, what in (("updates", "on this rollout"), ("staleness", "on other rollouts")):
        parts += [f"**Weights moved by updates {what}**", "", seen(rows, moved_by), ""]
        parts += ["The same: slope (correlation) of one change on another", ""]
        parts += [answers(rows, moved_by), ""]
    return "\n".join(parts).rstrip()


def seen(rows: list[dict], moved_by: str) -> str:
    """A table: mean |change| and share beyond the clip, a row a move, a column a view."""

    def cell(move, view):
        mean = average(rows, moved_by, move, view, "abs_mean")
        return f"{mean:.2g} ({average(rows, moved_by, move, view, 'outside'):.1%})"

    lines = [
        [*_named(move), *(cell(move, view) for view in VIEWS)] for move in moves(rows, moved_by)
    ]
    return _table(["trained with", "lr", "amount", *VIEWS], lines)


def answers(rows: list[dict], moved_by: str) -> str:
    """A table: slope and correlation between changes, a row a move with any update."""

    def cell(move, view, field):
        view = view or own_view(move[0])
        pair = [
            average(rows, moved_by, move, view, f"{field}_{kind}")
            for kind in ("slope", "correlation")
        ]
        return "-" if None in pair else "{:.2f} ({:.2f})".format(*pair)

    lines = [
        [*_named(move), *(cell(move, *answer) for answer in ANSWERS.values())]
        for move in moves(rows, moved_by)
        if move[-1] > 0
    ]
    return _table(["trained with", "lr", "amount", *ANSWERS], lines)


def _named(move: tuple) -> list[str]:
    trained, rate, amount = move
    return [trained or "-", "-" if rate is None else f"{rate:g}", f"{amount:g}"]


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        + ["| " + " | ".join(line) + " |" for line in lines]
    )


def figure(rows: list[dict]) -> Figure:
    """Four panels: changes under noise and by updates; what answers to what, by size of change."""
    drawing = Figure(figsize=(7.2, 5.4), layout="constrained", dpi=200)
    noise, size, answer, shared = drawing.subplots(2, 2).flat
    answer.sharex(size)
    shared.sharex(size)
    shaken = moves(rows, "noise")
    updated = [move for move in moves(rows, "updates") if move[-1] > 0]
    truth = [average(rows, "updates", move, change.BF16, "abs_mean") for move in updated]
    for view, (color, marker) in STYLE.items():
        look = dict(color=color, marker=marker, markersize=3, linewidth=1.0, label=view)
        dots = look | dict(linestyle="", alpha=0.75)
        y = [average(rows, "noise", move, view, "abs_mean") for move in shaken]
        noise.plot([move[-1] for move in shaken], y, **look)
        if view in (change.BF16, change.FLOAT32):
            continue
        for axes, field in (
            (size, "abs_mean"), (answer, "mean_slope"), (shared, "bf16_correlation"),
        ):  # fmt: skip
            if not (axes is answer and view == change.FP4_MEAN):  # 1 by construction
                y = [average(rows, "updates", move, view, field) for move in updated]
                axes.plot(truth, [np.nan if value is None else value for value in y], **dots)
    ends = [min(truth), max(truth)]
    size.plot(ends, ends, color=BLACK, linewidth=0.8)
    answer.axhline(1, color=BLACK, linewidth=0.8)
    for axes in (noise, size, answer, shared):
        axes.set(xscale="log")
    noise.set(yscale="log")
    size.set(yscale="log")
    answer.set(ylim=(-0.05, 2.05))
    shared.set(ylim=(-0.05, 1.02))
    mean, as_bf16 = "mean |log ratio| (nats)", "BF16's mean |log ratio| (nats)"
    _finish(noise, "Weights moved by noise", "noise / rms of the weights", mean)
    _finish(size, "By updates on the rollout (line: as BF16)", as_bf16, mean)
    _finish(answer, "Answer to the FP4 policy's mean change", as_bf16, "slope")
    _finish(shared, "Agreement with BF16's change", as_bf16, "correlation")
    handles, labels = noise.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return drawing


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=8)
    axes.set_xlabel(x, fontsize=7)
    axes.set_ylabel(y, fontsize=7)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.5)
