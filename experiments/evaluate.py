"""Held-out accuracy of a run's newest checkpoint: as deployed, guided, and in BF16.

    python -m experiments.evaluate --config=configs/tiny_cpu.py --workdir=runs/tiny
    python -m experiments.evaluate --config=configs/smollm2.py:runs/smollm2 --workdir=runs/before

Without a checkpoint, an import that config.model names is evaluated as it is. Prints one line a
number and the first answers, and writes evaluation.json. Unquantized means config.dtype.
"""

import jax

from experiments import command_line
from trace_jax.analysis.run_directory import RunDirectory
from trace_jax.guidance.policy import NOTHING
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import evaluation, run, tasks, warm_up
from trace_jax.rl.settings import Settings, resolve

SHOWN = 8  # answers


def main(config, workdir: str) -> None:
    """Evaluates. Raises FileNotFoundError where there is neither checkpoint nor import."""
    settings = resolve(config)
    task = tasks.load(settings.task, settings.seed)
    run.check_data(settings, task)
    with RunDirectory(workdir) as directory, jax.set_mesh(meshes.make_mesh(settings.mesh)):
        step, params = newest_or_imported(settings, directory)
        results, answers = {"step": step}, {}
        for name, policy in (("fp4", settings.quantized), ("bf16", NOTHING)):
            rollout, share = evaluation.greedy(settings, task, params, settings.evaluator(policy))
            results[f"eval/accuracy_{name}"] = share
            answers[name] = evaluation.completions(rollout, settings.tokenizer)[:SHOWN]
        results |= evaluation.guided_agreement(settings, task, params)
        for name, value in results.items():
            print(f"{name:24s} {value}")
        for example, *texts in zip(task.test, *answers.values(), strict=False):
            print(*map(repr, (example.prompt, *texts)), sep=" | ")
        directory.write_json("evaluation.json", results | {"answers": answers})


def newest_or_imported(settings: Settings, directory: RunDirectory) -> tuple[int, dict]:
    """(step, parameters) of the newest checkpoint, or of the import that the run starts from."""
    try:
        return warm_up.newest_params(settings, directory.checkpoints)
    except FileNotFoundError:
        if settings.source is None:
            raise
        return 0, warm_up.initial_params(settings)


if __name__ == "__main__":
    command_line.run(main, workdir="runs/tiny")
