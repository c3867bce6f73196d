"""Where the gap between rollout and trainer comes from, on one batch and without any learning.

    python -m experiments.mismatch --config=configs/tiny_cpu.py --workdir=runs/mismatch
    python -m experiments.mismatch --config=configs/mismatch.py --workdir=runs/mismatch --methods

Uses the parameters of workdir's newest checkpoint where there is one (the configuration must fit
it), else a model warmed up on the task. Writes mismatch.json, mismatch.md and
figures/attribution.png: the shares of the sources, then where they show. --methods adds the table
of methods over engine noise, and figures/mismatch.png.
"""

import jax
from absl import flags

from experiments import command_line
from trace_jax.analysis import anatomy, attribution, attribution_report, mismatch_table
from trace_jax.analysis.run_directory import RunDirectory
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import run, tasks, warm_up
from trace_jax.rl.settings import Settings, resolve

METHODS = flags.DEFINE_bool("methods", False, "also compare the methods, at each engine noise")


def attribute(settings: Settings, task: tasks.Task, params: dict) -> dict:
    """What mismatch.json holds of the sources of the gap."""
    bench = attribution.bench(settings, task, params)
    return {
        "prompts": settings.rollout.prompts,
        "sequences": settings.rollout.batch,
        "engine": attribution.engine(settings)[0],
        "updates": attribution.updates(settings),
        "top_p": settings.rollout.top_p,
        "top_k": settings.rollout.top_k,
        "sources": attribution.attribute(bench),
        "engines": anatomy.engines(bench),
        "by_site_and_layer": anatomy.by_site_and_layer(bench),
        "by_position": anatomy.by_position(bench),
        "growth": anatomy.growth(bench),
    }


def main(config, workdir: str, methods: bool = False) -> None:
    """Measures, prints the tables and writes them; methods: also the table of methods."""
    settings = resolve(config)
    task = tasks.load(settings.task, settings.seed)
    run.check_data(settings, task)
    with RunDirectory(workdir) as directory, jax.set_mesh(meshes.make_mesh(settings.mesh)):
        params = warm_up.trained_params(settings, task, directory.checkpoints)
        results = attribute(settings, task, params)
        text = attribution_report.markdown(results)
        attribution_report.figure(results).savefig(directory.figures / "attribution.png")
        if methods:
            results["methods"] = mismatch_table.table_of(settings, task, params)
            text += "\n\n" + mismatch_table.markdown(results["methods"])
            drawing = mismatch_table.figure(results["methods"])
            drawing.savefig(directory.figures / "mismatch.png")
        print(text)
        directory.write_json("mismatch.json", results)
        (directory.path / "mismatch.md").write_text(text + "\n")


if __name__ == "__main__":
    command_line.run(
        lambda config, workdir: main(config, workdir, METHODS.value),
        workdir="runs/mismatch",
        config="configs/mismatch.py",
    )
