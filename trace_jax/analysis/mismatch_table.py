"""Rollout against training forward on the same tokens, method by method; no learning involved.

Each method is an arm of analysis/comparison.py that sees what it would have recorded of one FP4
rollout. The trainer's kernels are this program's own (noise 0), or another engine's, emulated by
relative noise ahead of its quantizers, or keep their activations in BF16, which is no emulation
(models/layer_context.py). Where the rollout truncates, every
gap holds what the trainer's whole softmax adds (analysis/attribution.py tells it apart).
"""

import dataclasses

import jax
import numpy as np
import tqdm
from matplotlib.figure import Figure

from trace_jax.analysis import comparison, record_bytes
from trace_jax.analysis.comparison import Arm
from trace_jax.analysis.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from trace_jax.guidance import mismatch
from trace_jax.guidance.policy import NOTHING
from trace_jax.guidance.record import LAYERS
from trace_jax.models.layer_context import EngineNoise
from trace_jax.rl.settings import Settings
from trace_jax.rl.tasks import Task
from trace_jax.rollout import log_probs
from trace_jax.rollout.sampler import Rollout
from trace_jax.training.step import Trainer

NOISE = (0.0, 0.002, 0.01, 0.03, 0.05, 0.1)
BF16_ENGINE = None  # in the place of a noise: measured, activations kept in BF16 between operations
COLUMNS = {
    "bytes a token": "guidance_bytes",
    "codes": "code_rate",
    "codes, latter half": "code_rate_latter_half",
    "scales": "scale_rate",
    "D_act": "d_act",
    "routes": "route_rate",
    "mean gap (nats)": "logp_abs_mean",
    "max gap (nats)": "logp_abs_max",
    "k3 (nats)": "kl_k3_nats",
}
SHARES = {  # of the layers, guided by the low bit
    "latter_eighth": "trace (low bit, latter eighth)",
    "latter_quarter": "trace (low bit, latter quarter)",
    "latter_half": "trace (low bit, latter half)",
    "first_half": "trace (low bit, first half)",
}
ENCODINGS = {  # of all layers
    "scales": "scales, all layers",
    "bits": "low bit in own scales, all layers",
    "low1": "trace, all layers",
    "low2": "two low bits, all layers",
    "syndrome": "syndrome, all layers",
    "codes": "trace_full (codes, all layers)",
}
DRAWN = {  # name -> colour and line
    "bf16 (BF16 rollout)": (GREY, "-"),
    "fp4_rollout": (BLACK, "-"),
    "qat": (VERMILLION, "-"),
    "qat, routes replayed": (ORANGE, "-"),
    ENCODINGS["scales"]: (SKY, "-"),
    ENCODINGS["bits"]: (SKY, ":"),
    SHARES["latter_half"]: (PURPLE, "-"),
    ENCODINGS["low1"]: (BLUE, "-"),
    ENCODINGS["codes"]: (GREEN, "--"),  # mostly it lies on the one before
    ENCODINGS["syndrome"]: (PURPLE, ":"),
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A row's name, and how its trainer reads the rollout."""

    name: str
    arm: Arm
    replay_routes: bool = False


BF16 = Method("bf16 (BF16 rollout)", Arm(NOTHING))


def methods(settings: Settings) -> list[Method]:
    """The methods, and between them what tells routes from rounding and layers from encoding."""
    quantized, depth = settings.quantized, settings.cfg.num_layers
    some = [share for share in SHARES if range(*LAYERS[share](depth))]
    return [
        Method("fp4_rollout", Arm(quantized.only(weights=False, sites=()))),
        Method("qat", Arm(quantized)),
        Method("qat, routes replayed", Arm(quantized), replay_routes=True),
        *(guided(settings, SHARES[share], "low1", share) for share in some),
        *(guided(settings, ENCODINGS[encoding], encoding) for encoding in ENCODINGS),
    ]


def guided(settings: Settings, name: str, encoding: str, share: str = "all") -> Method:
    """A method that records an encoding in a share of the layers."""
    recording = comparison.recording(settings, encoding, share)
    return Method(name, Arm(settings.quantized, recording), replay_routes=True)


def engine(settings: Settings, noise: float | None) -> EngineNoise:
    """Relative noise in all layers, or BF16 activations."""
    return comparison.engine(settings, noise or 0.0, noise is BF16_ENGINE)


def measure(
    settings: Settings,
    trainer: Trainer,
    params: dict,
    rollout: Rollout,
    method: Method,
    noise: float | None,
) -> dict:
    """One row: the method, the noise, rates over all guided sites, log-prob gap, rates by layer."""
    arm = method.arm
    if arm.policy.weights:
        params = comparison.weights(params, settings.quantized, settings.dtype, True)
    seen = jax.device_get(
        comparison.compare(
            trainer, arm, params, rollout, engine(settings, noise), method.replay_routes
        )
    )
    row = {"method": method.name, "noise": noise}
    if arm.recording:
        cfg, quantized = settings.cfg, settings.quantized
        row["guidance_bytes"] = record_bytes.of_recording(arm.recording, cfg, quantized)
    row |= {name.split("/")[1]: float(value) for name, value in seen.metrics.items()}
    if seen.sites:
        depth, present = settings.cfg.num_layers, rollout.audit.layers
        in_layers = lambda kept: mismatch.of_layers(
            seen.sites, present, tuple((site, tuple(kept)) for site in seen.sites)
        )
        row["code_rate_latter_half"] = float(in_layers(range(depth // 2, depth)).code_rate)
        row["code_rate_by_layer"] = [float(in_layers([i]).code_rate) for i in range(depth)]
        row["code_rate_by_site"] = {
            site: float(jax.tree.map(np.sum, m).code_rate) for site, m in seen.sites.items()
        }
    return row


def own_rollout(settings: Settings, trainer: Trainer, params: dict, rollout: Rollout) -> Rollout:
    """The rollout as a trainer that follows its routes would have recorded it."""
    reader = dataclasses.replace(
        trainer, policy=settings.quantized, replay_routes=True,
        audit=comparison.recording(settings, "codes"),
    )  # fmt: skip
    weights = comparison.weights(params, settings.quantized, settings.dtype, True)
    out = jax.jit(reader.forward)(weights, rollout, engine(settings, 0.0))
    logp_BT, _ = log_probs.next_token_log_probs(out.logits, rollout.tokens_BT, trainer.temperature)
    return dataclasses.replace(rollout, audit=out.recorded[0], logp_BT=logp_BT * rollout.mask_BT)


def table_of(settings: Settings, task: Task, params: dict, progress: bool = True) -> list[dict]:
    """All rows: BF16 against BF16, every method at every noise, and the self-replays.

    A self-replay, the trainer's own forward recorded and then replayed, must be exactly zero.
    """
    trainer = settings.trainer()
    bf16 = comparison.sample(settings, task, params, NOTHING)
    fp4 = comparison.sample(settings, task, params, settings.quantized)
    rollouts = [(BF16, bf16), *((method, fp4) for method in methods(settings))]
    rows = []
    for method, rollout in tqdm.tqdm(rollouts, desc="methods", disable=not progress):
        engines = (BF16_ENGINE, *NOISE)
        rows += [measure(settings, trainer, params, rollout, method, noise) for noise in engines]
    rows.sort(key=lambda row: -1 if row["noise"] is BF16_ENGINE else row["noise"])  # stable
    own = own_rollout(settings, trainer, params, fp4)
    for encoding in ("codes", "low1", "low2"):
        replay = guided(settings, f"self-replay ({encoding})", encoding)
        rows.append(measure(settings, trainer, params, own, replay, 0.0))
    return rows


def markdown(rows: list[dict]) -> str:
    """The rows as a table, one block a noise level."""

    def number(value):
        return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2g}"

    lines = ["| noise | method | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in rows:
        cells = [number(row.get(key)) for key in COLUMNS.values()]
        noise = "BF16" if row["noise"] is BF16_ENGINE else f"{row['noise']:.1%}"
        lines.append(f"| {noise} | {row['method']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(rows: list[dict]) -> Figure:
    """Code mismatch by layer at 1% noise, and the mean log-prob gap over noise, of DRAWN."""
    drawing = Figure(figsize=(7.2, 3.2), layout="constrained", dpi=200)
    left, right = drawing.subplots(1, 2)
    for name, (color, line) in DRAWN.items():
        mine = [row for row in rows if row["method"] == name and row["noise"] is not BF16_ENGINE]
        style = dict(color=color, label=name, marker="o", markersize=3, linestyle=line)
        for row in mine:
            if row["noise"] == 0.01 and "code_rate_by_layer" in row:
                rates = np.maximum(row["code_rate_by_layer"], 1e-7)
                left.plot(range(1, len(rates) + 1), rates, **style)
        if mine:
            gaps = [row["logp_abs_mean"] for row in mine]
            right.plot([100 * row["noise"] for row in mine], gaps, **style)
    left.set(yscale="log", xlabel="layer", ylabel="rate (0 drawn at 1e-7)",
             title="Code mismatch, 1% emulated noise")  # fmt: skip
    right.set(yscale="log", xlabel="emulated engine noise (%)", ylabel="mean |log-prob gap| (nats)",
              title="Gap between rollout and trainer")  # fmt: skip
    for axes in (left, right):
        axes.title.set_size(9)
        axes.tick_params(labelsize=8)
    left.xaxis.get_major_locator().set_params(integer=True)
    right.set_xscale("symlog", linthresh=0.2)
    right.set_xticks([0, 0.2, 1, 3, 10], ["0", "0.2", "1", "3", "10"])
    right.set_xlim(-0.02, 12)
    handles, labels = right.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    return drawing
