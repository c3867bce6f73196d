"""How far rollout and training forward are apart, method by method, without any learning.

    python -m experiments.mismatch --config=configs/mismatch.py --workdir=runs/mismatch

Uses the parameters of workdir's newest checkpoint where there is one (the configuration must fit
it), else a model warmed up on the task. Writes mismatch.json, mismatch.md and figures/mismatch.png.
"""

import jax

from experiments import command_line
from trace_jax.analysis import mismatch_table
from trace_jax.analysis.run_directory import RunDirectory
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import run, tasks, warm_up
from trace_jax.rl.settings import resolve


def main(config, workdir: str) -> None:
    """Measures, prints the table and writes it."""
    settings = resolve(config)
    task = tasks.load(settings.task, settings.seed)
    run.check_data(settings, task)
    with RunDirectory(workdir) as directory, jax.set_mesh(meshes.make_mesh(settings.mesh)):
        params = warm_up.trained_params(settings, task, directory.checkpoints)
        rows = mismatch_table.table_of(settings, task, params)
        print(mismatch_table.markdown(rows))
        directory.write_json("mismatch.json", rows)
        (directory.path / "mismatch.md").write_text(mismatch_table.markdown(rows) + "\n")
        mismatch_table.figure(rows).savefig(directory.figures / "mismatch.png")


if __name__ == "__main__":
    command_line.run(main, workdir="runs/mismatch", config="configs/mismatch.py")
