"""Held-out accuracy of a run's newest checkpoint: as deployed, guided, and in BF16.

    python -m experiments.evaluate --config=configs/tiny_cpu.py --workdir=runs/tiny

Prints one line a number and writes evaluation.json.
"""

import jax

from experiments import command_line
from trace_jax.analysis.run_directory import RunDirectory
from trace_jax.guidance.policy import NOTHING
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import evaluation, run, tasks, warm_up
from trace_jax.rl.settings import resolve


def main(config, workdir: str) -> None:
    """Evaluates. Raises FileNotFoundError where workdir has no checkpoint."""
    settings = resolve(config)
    task = tasks.load(settings.task, settings.seed)
    run.check_data(settings, task)
    with RunDirectory(workdir) as directory, jax.set_mesh(meshes.make_mesh(settings.mesh)):
        step, params = warm_up.newest_params(settings, directory.checkpoints)
        results = {
            "step": step,
            "eval/accuracy_fp4": evaluation.accuracy(settings, task, params, settings.quantized),
            "eval/accuracy_bf16": evaluation.accuracy(settings, task, params, NOTHING),
            **evaluation.guided_agreement(settings, task, params),
        }
        for name, value in results.items():
            print(f"{name:24s} {value}")
        directory.write_json("evaluation.json", results)


if __name__ == "__main__":
    command_line.run(main, workdir="runs/tiny")
