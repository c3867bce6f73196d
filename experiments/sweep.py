"""Many runs of experiments.rl: methods, sizes, seeds. Only what is missing is run; then the report.

    python -m experiments.sweep --config=configs/sweeps/methods.py --workdir=runs/methods
        [--dry_run] [--config.jobs=2] [--config.launcher=slurm|none]

Started again after a kill it goes on. A run that fails is named in the report, tried again at the
next start, and stops no other. With slurm the jobs are submitted and the report has what is done.
"""

import sys
from pathlib import Path

import tqdm
from absl import flags

from experiments import command_line
from trace_jax.sweeps import launch, report
from trace_jax.sweeps.runs import plain, runs_of

DRY_RUN = flags.DEFINE_bool("dry_run", False, "print the runs, their states and the cost; stop")


def main(config, workdir: str) -> None:
    """Runs what is missing and writes the report; a wrong configuration stops it before any run."""
    root = Path(workdir).absolute()
    runs = runs_of(config, root)
    launcher, jobs = config["launcher"], config["jobs"]
    if launcher not in launch.LAUNCHERS:
        raise ValueError(f"config.launcher={launcher!r} is unknown: choose of {launch.LAUNCHERS}")
    if jobs < 1:
        raise ValueError(f"config.jobs={jobs}: must be 1 or more")
    for run in runs:
        run.check()
    print(launch.listing(runs, jobs))
    if DRY_RUN.value:
        return
    missing = [run for run in runs if run.state != "done"]
    if launcher == "local":
        bar = tqdm.tqdm(total=len(missing), desc="sweep")
        for run, done in launch.local(missing, jobs, config["gpus_per_run"]):
            bar.write(f"{'done' if done else 'FAILED'} {run.name}")
            bar.update()
        bar.close()
    elif launcher == "slurm" and missing:
        jobs = launch.slurm(missing, root / "slurm", plain(config["slurm"]))
        print(f"submitted {len(jobs)} jobs, the first is {jobs[0].job_id}")
    root.mkdir(parents=True, exist_ok=True)
    print(report.write(runs, root))
    failed = [run.name for run in runs if run.state == "failed"]
    if failed:
        sys.exit(f"error: {len(failed)} runs failed: {', '.join(failed)}")


if __name__ == "__main__":
    command_line.run(main, workdir="runs/sweep", config="configs/sweeps/methods.py")
