"""Whether a model fits a set of chips, and how fast its rollouts can be at best: FP4 beside BF16.

    python -m experiments.plan --model=qwen3_5_35b_a3b --topology=v5p:2x2x2 --workdir=runs/plan
    python -m experiments.plan --model=all --topology=h100:1x8 --workdir=runs/plans

A topology is a chip of analysis/cost_model.py and its grid. Everything is predicted from shapes:
floors, no compile. FP4 is the paper's: experts, K and V; low bit recorded in the latter half.
"""

import math

from absl import flags

from configs import paper_sites
from experiments import command_line
from trace_jax.analysis import cost_model
from trace_jax.analysis.run_directory import RunDirectory
from trace_jax.guidance.policy import NOTHING
from trace_jax.models import config as models
from trace_jax.rl.settings import resolve

MODEL = flags.DEFINE_string("model", "qwen3_5_35b_a3b", "a name of models/config.py, or all")
TOPOLOGY = flags.DEFINE_string("topology", "v5p:2x2x2", "CHIP:AxB[xC]")
BATCH = flags.DEFINE_integer("batch", 64, "sequences at once", lower_bound=1)
PROMPT = flags.DEFINE_integer("prompt", 1024, "tokens", lower_bound=1)


def parse_topology(text: str) -> tuple[str, int]:
    """(chip, number of chips) of CHIP:AxB[xC]. Raises ValueError for anything else."""
    name, _, grid = text.partition(":")
    sides = grid.split("x")
    if not all(side.isdecimal() and int(side) for side in sides):
        raise ValueError(f"--topology={text!r}: give CHIP:AxB[xC], as v5p:2x2x2 or h100:1x8")
    cost_model.chip(name)
    return name, math.prod(int(side) for side in sides)


def plan(model: str, topology: str, batch: int, prompt: int) -> dict:
    """What fits and how fast, for one model on one topology; plain numbers (bytes, tokens/s)."""
    name, chips = parse_topology(topology)
    on = cost_model.chip(name)
    settings = resolve(paper_sites.get_config(model))
    policies = {"bf16": (NOTHING, None), "fp4": (settings.quantized, settings.recording)}
    result = {"model": model, "topology": topology, "batch": batch, "prompt": prompt}
    for precision, (policy, recording) in policies.items():
        of = cost_model.sizes(policy, settings.cfg, recording)
        result[precision] = {
            "weight_bytes_per_chip": of.weight_bytes / chips,
            "kv_bytes_per_token": of.kv_bytes + of.index_bytes,
            "state_bytes_per_sequence": of.state_bytes,
            "guidance_bytes_per_token": of.guidance_bytes,
            "largest_length": cost_model.largest_length(of, on, chips, batch),
            "step_bytes_at_128k": cost_model.step_bytes(of, batch, 2**17),
            "step_seconds_at_128k": cost_model.step_seconds(of, on, chips, batch, 2**17),
        }
    result["speed_up"] = cost_model.speed_up(
        settings.cfg, settings.quantized, settings.recording, on, chips, batch, prompt
    )
    return result


def table(plans: list[dict]) -> str:
    """Markdown: a line a model; GB are 1e9 bytes."""
    lengths = [row["length"] for row in plans[0]["speed_up"]]
    heads = ["model", "weights GB a chip, BF16", "FP4", "KV B a token, BF16", "FP4",
             "guidance B a token", "longest BF16", "FP4",
             *(f"{n // 1024}K" for n in lengths), "128K, largest batch"]  # fmt: skip
    lines = [heads, ["---"] * len(heads)]
    for one in plans:
        bf16, fp4 = one["bf16"], one["fp4"]
        gb = [f"{of['weight_bytes_per_chip'] / 1e9:.2f}" for of in (bf16, fp4)]
        largest = {row["length"]: row["largest"] for row in one["speed_up"]}[2**17]
        lines.append([
            one["model"], *gb, f"{bf16['kv_bytes_per_token']:,}", f"{fp4['kv_bytes_per_token']:,}",
            f"{fp4['guidance_bytes_per_token']:,}",
            *(f"{of['largest_length'] / 1024:.0f}K" if of["largest_length"] else "does not fit"
              for of in (bf16, fp4)),
            *(f"{row['same']:.2f}" for row in one["speed_up"]),
            f"{largest:.2f}" if largest else "-",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(_, workdir: str) -> None:
    """Prints the table and writes plan.json."""
    names = list(models.MODELS) if MODEL.value == "all" else [MODEL.value]
    plans = [plan(name, TOPOLOGY.value, BATCH.value, PROMPT.value) for name in names]
    with RunDirectory(workdir) as directory:
        directory.write_json("plan.json", plans)
    print(table(plans))


if __name__ == "__main__":
    command_line.run(main, workdir="runs/plan")
