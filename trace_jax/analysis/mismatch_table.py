"""Rollout against training forward on the same tokens, method by method; no learning involved.

One FP4 rollout records the full codes of every site and layer. Each arm is a training forward over
its tokens that sees what its method would have recorded; the two are compared site by site. The
trainer's kernels are this program's own (noise 0), or another engine's, emulated by relative noise
ahead of its quantizers (models/layer_context.py).
"""

import dataclasses
import functools

import jax
import numpy as np
from matplotlib.figure import Figure

from trace_jax.analysis.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION
from trace_jax.guidance import mismatch, record
from trace_jax.guidance.policy import NOTHING, Policy
from trace_jax.guidance.record import Recording
from trace_jax.models import architecture, packing
from trace_jax.models.layer_context import EngineNoise
from trace_jax.rl import batches, gap
from trace_jax.rl.evaluation import on_mesh
from trace_jax.rl.settings import Settings
from trace_jax.rl.tasks import Task
from trace_jax.rollout import log_probs
from trace_jax.rollout.sampler import Rollout
from trace_jax.training.step import Trainer, valid_inputs

NOISE = (0.0, 0.002, 0.01, 0.05)
COLUMNS = {
    "codes": "code_rate",
    "codes, latter half": "code_rate_latter_half",
    "scales": "scale_rate",
    "D_act": "d_act",
    "routes": "route_rate",
    "mean gap (nats)": "logp_abs_mean",
    "max gap (nats)": "logp_abs_max",
    "k3 (nats)": "kl_k3_nats",
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way for the trainer to read the rollout."""

    name: str
    policy: Policy
    recording: Recording | None = None
    replay_routes: bool = False


def arms(settings: Settings) -> list[Arm]:
    """The methods, and between them what tells routes from rounding and layers from encoding."""
    quantized, layers = settings.quantized, architecture.site_layers(settings.cfg)

    def guided(name, encoding, share):
        kept = record.recording(encoding, guided_patterns(settings), share, layers, quantized)
        return Arm(name, quantized, kept, replay_routes=True)

    return [
        Arm("fp4_rollout", quantized.only(weights=False, sites=())),
        Arm("qat", quantized),
        Arm("qat, routes replayed", quantized, None, replay_routes=True),
        guided("trace (low bit, latter half)", "low1", "latter_half"),
        guided("trace, all layers", "low1", "all"),
        guided("trace_full (codes, all layers)", "codes", "all"),
    ]


def guided_patterns(settings: Settings) -> tuple[str, ...]:
    """The sites that guidance covers: every quantized one but experts/mid, which follows."""
    return tuple(site for site in settings.quantized.sites if site != "experts/mid")


def full_recording(settings: Settings) -> Recording:
    """Full codes of all guided sites and layers."""
    sites, layers = guided_patterns(settings), architecture.site_layers(settings.cfg)
    return record.recording("codes", sites, "all", layers, settings.quantized)


def sample(
    settings: Settings, task: Task, params: dict, policy: Policy, recording, index: int = 0
) -> Rollout:
    """Training prompts, batch `index`, at the configured temperature, recorded in full."""
    s = settings.rollout
    tokens_BP, length_B, _ = batches.prompt_batch(
        task, settings.tokenizer, index, s.prompts, s.prompt_length, settings.seed
    )
    tokens_BP, length_B = (np.repeat(a, s.completions, axis=0) for a in (tokens_BP, length_B))
    tokens, length, ids = on_mesh((tokens_BP, length_B, np.arange(s.batch)))
    sampler = dataclasses.replace(settings.evaluator(policy), recording=recording)
    packed = packing.pack_jit(params, policy, settings.dtype)
    return sampler(packed, tokens, length, jax.random.key(1 + index), ids, s.temperature)


def measure(settings: Settings, params: dict, rollout: Rollout, arm: Arm, noise: float) -> dict:
    """One row: the arm, the noise, rates over all guided sites, log-prob gap, rates by layer."""
    trainer = dataclasses.replace(
        settings.trainer(), policy=arm.policy, replay_routes=arm.replay_routes,
        audit=full_recording(settings) if arm.policy.sites else None,
    )  # fmt: skip
    guidance = arm.recording and record.reduce(rollout.audit, arm.recording)
    given = dataclasses.replace(rollout, guidance=guidance)
    emulated = EngineNoise(jax.random.key(2), noise) if noise else None
    gap_metrics, sites = jax.device_get(compare(trainer, params, given, emulated))
    row = {"method": arm.name, "noise": noise}
    row |= {name.split("/")[1]: float(value) for name, value in gap_metrics.items()}
    if sites:
        depth, present = settings.cfg.num_layers, rollout.audit.layers
        in_layers = lambda kept: mismatch.of_layers(
            sites, present, tuple((site, tuple(kept)) for site in sites)
        )
        row["code_rate_latter_half"] = float(in_layers(range(depth // 2, depth)).code_rate)
        row["code_rate_by_layer"] = [float(in_layers([i]).code_rate) for i in range(depth)]
        row["code_rate_by_site"] = {
            site: float(jax.tree.map(np.sum, m).code_rate) for site, m in sites.items()
        }
    return row


@functools.partial(jax.jit, static_argnums=0)
def compare(
    trainer: Trainer, params: dict, rollout: Rollout, noise: EngineNoise | None
) -> tuple[dict, dict]:
    """(gap and mismatch metrics, Mismatch by site) of one training forward."""
    out = trainer.forward(params, rollout, noise)
    logp_BT, _ = log_probs.next_token_log_probs(out.logits, rollout.tokens_BT, trainer.temperature)
    metrics = gap.gap_metrics(logp_BT, rollout.logp_BT, rollout.mask_BT)
    metrics |= trainer.mismatch_metrics(out, rollout)
    sites = {}
    if out.recorded:
        sites = mismatch.compare(out.recorded[0], rollout.audit, valid_inputs(rollout))
    return metrics, sites


def self_replay(settings: Settings, params: dict, rollout: Rollout, encoding: str) -> dict:
    """A row that must be exactly zero: the trainer's own forward, recorded and then replayed."""
    full, layers = full_recording(settings), architecture.site_layers(settings.cfg)
    trainer = dataclasses.replace(
        settings.trainer(), policy=settings.quantized, replay_routes=True, audit=full,
    )  # fmt: skip
    plain = dataclasses.replace(rollout, guidance=None)
    out = jax.jit(trainer.forward)(params, plain)
    logp_BT, _ = log_probs.next_token_log_probs(out.logits, rollout.tokens_BT, trainer.temperature)
    own = dataclasses.replace(plain, audit=out.recorded[0], logp_BT=logp_BT * rollout.mask_BT)
    recording = record.recording(encoding, full.sites, "all", layers, settings.quantized)
    arm = Arm(f"self-replay ({encoding})", settings.quantized, recording, replay_routes=True)
    return measure(settings, params, own, arm, 0.0)


def table_of(settings: Settings, task: Task, params: dict) -> list[dict]:
    """All rows: BF16 against BF16, every arm at every noise, and the self-replays."""
    bf16 = sample(settings, task, params, NOTHING, None)
    fp4 = sample(settings, task, params, settings.quantized, full_recording(settings))
    fp4 = dataclasses.replace(fp4, audit=fp4.guidance, guidance=None)
    rows = []
    for noise in NOISE:
        rows.append(measure(settings, params, bf16, Arm("bf16 (BF16 rollout)", NOTHING), noise))
        rows += [measure(settings, params, fp4, arm, noise) for arm in arms(settings)]
    return rows + [self_replay(settings, params, fp4, e) for e in ("codes", "low1", "low2")]


def markdown(rows: list[dict]) -> str:
    """The rows as a table, one block a noise level."""
    number = lambda value: "-" if value is None else f"{value:.2g}"
    lines = ["| noise | method | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in rows:
        cells = [number(row.get(key)) for key in COLUMNS.values()]
        lines.append(f"| {row['noise']:.1%} | {row['method']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(rows: list[dict]) -> Figure:
    """Code mismatch by layer at 1% noise, and the mean log-prob gap over noise, per method."""
    methods = list(dict.fromkeys(r["method"] for r in rows if not r["method"].startswith("self")))
    order = (GREY, BLACK, VERMILLION, ORANGE, PURPLE, BLUE, GREEN)
    colors = dict(zip(methods, order, strict=False))
    drawing = Figure(figsize=(7.2, 3.0), layout="constrained", dpi=200)
    left, right = drawing.subplots(1, 2)
    for name in methods:
        mine = [row for row in rows if row["method"] == name]
        dashed = "--" if name.startswith("trace_full") else "-"  # it lies on trace, all layers
        style = dict(color=colors[name], label=name, marker="o", markersize=3, linestyle=dashed)
        for row in mine:
            if row["noise"] == 0.01 and "code_rate_by_layer" in row:
                rates = np.maximum(row["code_rate_by_layer"], 1e-7)
                left.plot(range(1, len(rates) + 1), rates, **style)
        gaps = [row["logp_abs_mean"] for row in mine]
        right.plot([100 * row["noise"] for row in mine], gaps, **style)
    left.set(yscale="log", xlabel="layer", ylabel="rate (0 drawn at 1e-7)",
             title="Code mismatch, 1% emulated noise")  # fmt: skip
    right.set(yscale="log", xlabel="emulated engine noise (%)", ylabel="mean |log-prob gap| (nats)",
              title="Gap between rollout and trainer")  # fmt: skip
    right.set_xscale("symlog", linthresh=0.2)
    right.set_xticks([0, 0.2, 1, 5], ["0", "0.2", "1", "5"])
    right.set_xlim(-0.02, 6)
    handles, labels = right.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    return drawing
