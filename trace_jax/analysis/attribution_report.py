"""What `experiments.mismatch` found, as a table and as one figure, from mismatch.json alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trace_jax.analysis.plots import BLUE, GREY, METHOD_COLORS

ENDS = {"none": "with none of them", "all": "with all of them"}
TRAINER_COLORS = {"BF16": METHOD_COLORS["fp4_rollout"], "QAT": METHOD_COLORS["qat"]}
LINE_COLORS = METHOD_COLORS | {"trace, all layers": BLUE}
FLOOR = 1e-7  # where a log axis draws 0
TINY, SMALL = 6.5, 7.5  # font sizes


def markdown(results: Mapping[str, Any]) -> str:
    """What was compared, the shares of every source, then QAT under each pair of engines."""
    truncated = results["top_p"] < 1 or results["top_k"] > 0
    lines = [
        f"{results['sequences']} sequences of {results['prompts']} prompts; 95%: bootstrap over "
        f"prompts. kernels: {results['engine']}. staleness: {results['updates']} updates."
        + f" truncation: top_p {results['top_p']}, top_k {results['top_k']}."
        * truncated,
        "",
        "| trainer | source | share of the gap (nats) | 95% | of all | alone | last "
        "| share of D_act | 95% | of all | alone | last |",
        "|---" * 12 + "|",
    ]
    whole = {row["trainer"]: row for row in results["sources"] if row["source"] == "all"}
    for row in results["sources"]:
        cells = [row["trainer"], ENDS.get(row["source"], row["source"])]
        for name in ("gap", "d_act"):
            cells += _cells(row[name], whole[row["trainer"]][name]["share"])
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| engines, QAT | mean gap (nats) | codes | scales | D_act |",
        "|---" * 5 + "|",
    ]
    for row in results["engines"]:
        numbers = (row[name] for name in ("gap", "code_rate", "scale_rate", "d_act"))
        lines.append(f"| {row['engine']} | " + " | ".join(map(_number, numbers)) + " |")
    return "\n".join(lines)


def figure(results: Mapping[str, Any]) -> Figure:
    """Shares of the gap, where codes differ, the gap along a completion, growth through layers."""
    drawing = Figure(figsize=(7.2, 5.6), layout="constrained", dpi=200)
    (shares, heat), (along, through) = drawing.subplots(2, 2)
    draw_shares(shares, results["sources"])
    draw_sites(heat, results["by_site_and_layer"], drawing)
    draw_positions(along, results["by_position"])
    draw_growth(through, results["growth"])
    for axes in (shares, heat, along, through):
        axes.title.set_size(9)
        axes.xaxis.label.set_size(SMALL)
        axes.yaxis.label.set_size(SMALL)
        axes.tick_params(labelsize=SMALL)
    drawing.suptitle(f"other engine: {results['engine']}", fontsize=SMALL, color=GREY)
    return drawing


def draw_shares(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Each source's share of its trainer's mean gap (%), with its 95% interval."""
    trainers = list(dict.fromkeys(row["trainer"] for row in rows))
    sources = [row["source"] for row in rows if row["source"] not in ENDS]
    places = {source: -place for place, source in enumerate(dict.fromkeys(sources))}
    height = 0.8 / len(trainers)
    shift = lambda i, source: (len(trainers) - 1) / 2 - i if sources.count(source) > 1 else 0
    for i, trainer in enumerate(trainers):
        mine = [row for row in rows if row["trainer"] == trainer]
        whole = next(row["gap"]["share"] for row in mine if row["source"] == "all")
        mine = [row for row in mine if row["source"] not in ENDS]
        at = [places[row["source"]] + height * shift(i, row["source"]) for row in mine]
        low, share, high = (
            np.array([100 * row["gap"][end] / whole for row in mine])
            for end in ("low", "share", "high")
        )
        axes.barh(
            at,
            share,
            height,
            color=TRAINER_COLORS[trainer],
            label=f"{trainer} trainer: {whole:.2g} nats",
        )
        axes.errorbar(
            share, at, xerr=(share - low, high - share), fmt="none", ecolor="black",
            elinewidth=0.8, capsize=1.5,
        )  # fmt: skip
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_yticks(list(places.values()), list(places))
    axes.set(title="Sources of the log-prob gap", xlabel="Shapley share of the mean gap (%)")
    axes.legend(
        fontsize=SMALL, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18)
    )
    axes.spines[["top", "right"]].set_visible(False)


def draw_sites(axes: Axes, rates: Mapping[str, Sequence[float | None]], drawing: Figure) -> None:
    """A heat map of code mismatch, sites over layers."""
    share = np.array([[np.nan if rate is None else rate for rate in row] for row in rates.values()])
    layers = share.shape[1]
    image = axes.imshow(100 * share, cmap="cividis", aspect="auto", vmin=0)
    dark = np.nanmax(share) / 2
    for (site, layer), rate in np.ndenumerate(share):
        if np.isfinite(rate) and layers <= 8:
            color = "white" if rate < dark else "black"
            axes.text(
                layer, site, f"{100 * rate:.0f}", ha="center", va="center", fontsize=TINY,
                color=color,
            )  # fmt: skip
    step = -(-layers // 8)
    axes.set_xticks(range(0, layers, step), range(1, layers + 1, step))
    axes.set_yticks(range(len(rates)), list(rates))
    axes.set(title="Codes that differ, QAT", xlabel="layer")
    bar = drawing.colorbar(image, ax=axes)
    bar.set_label("% of codes", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)


def draw_positions(axes: Axes, found: Mapping[str, Any]) -> None:
    """The mean gap at each place of the completion, one line a method."""
    for name, gaps in found["gap"].items():
        axes.plot(
            range(1, len(gaps) + 1), np.maximum(gaps, FLOOR), color=LINE_COLORS[name], label=name,
            marker="o", markersize=2.5,
        )  # fmt: skip
    axes.set(yscale="log", title="Along the completion", xlabel="completion token",
             ylabel=f"mean |gap| (nats; floor {FLOOR:.0e})")  # fmt: skip
    axes.xaxis.get_major_locator().set_params(integer=True)
    _finish(axes)


def draw_growth(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Code mismatch from the one noisy layer on; a line for each layer that is."""
    styles = {"qat": "-", "trace, all layers": "--"}
    for row in rows:
        at = row["noisy_layer"]
        layers = np.arange(1 + at, 1 + len(row["code_rate"]))
        rates = np.maximum(row["code_rate"][at:], FLOOR)
        style = dict(color=LINE_COLORS[row["method"]], linestyle=styles[row["method"]])
        label = row["method"] if at == 0 else None
        axes.plot(layers, rates, linewidth=1, label=label, **style)
        axes.plot(layers[0], rates[0], marker="o", markersize=3.5, **style)
    axes.plot([], [], "o", color=GREY, markersize=3.5, label="the noisy layer")
    axes.set(yscale="log", title="Growth of an error made in one layer", xlabel="layer",
             ylabel=f"share of codes (floor {FLOOR:.0e})")  # fmt: skip
    axes.xaxis.get_major_locator().set_params(integer=True)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(color="#DDDDDD", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=SMALL, frameon=False)


def _cells(share: Mapping[str, float], whole: float) -> list[str]:
    ends = f"{_number(share['low'])} .. {_number(share['high'])}"
    others = [_number(share[name]) if name in share else "-" for name in ("alone", "last")]
    return [_number(share["share"]), ends, f"{share['share'] / whole:.0%}", *others]


def _number(value: float) -> str:
    return f"{value:.2g}"
