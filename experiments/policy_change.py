"""What a log-ratio shows of a policy's change, and what of it is rounding.

    python -m experiments.policy_change --config=configs/tiny_cpu.py --workdir=runs/policy_change

Uses the parameters of workdir's newest checkpoint where there is one (the configuration must fit
it), else a model warmed up on the task. Writes policy_change.json, policy_change.md and
figures/policy_change.png.
"""

import jax

from experiments import command_line
from trace_jax.analysis import policy_change, policy_change_report
from trace_jax.analysis.run_directory import RunDirectory
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import run, tasks, warm_up
from trace_jax.rl.settings import resolve


def main(config, workdir: str) -> None:
    """Measures, prints the tables and writes them."""
    settings = resolve(config)
    task = tasks.load(settings.task, settings.seed)
    run.check_data(settings, task)
    with RunDirectory(workdir) as directory, jax.set_mesh(meshes.make_mesh(settings.mesh)):
        params = warm_up.trained_params(settings, task, directory.checkpoints)
        rows = policy_change.measure(settings, task, params)
        report = policy_change_report.markdown(rows)
        print(report)
        directory.write_json("policy_change.json", rows)
        (directory.path / "policy_change.md").write_text(report + "\n")
        policy_change_report.figure(rows).savefig(directory.figures / "policy_change.png")


if __name__ == "__main__":
    command_line.run(main, workdir="runs/policy_change")
