"""Runs what a sweep still misses: on this machine, so many at a time, or as Slurm jobs."""

import collections
import os
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from trace_jax.analysis.run_directory import read_summary
from trace_jax.sweeps.runs import Run

LAUNCHERS = ("local", "slurm", "none")


def local(runs: Sequence[Run], jobs: int, gpus_per_run: int = 0) -> Iterator[tuple[Run, bool]]:
    """Yields (run, whether it is done) as runs end; one that fails does not stop the others.

    With gpus_per_run each of the `jobs` places sees its own GPUs (CUDA_VISIBLE_DEVICES).
    """
    places = queue.SimpleQueue()
    for place in range(jobs):
        places.put(place)

    def execute(run: Run) -> bool:
        place = places.get()
        try:
            return run.execute(os.environ | visible_gpus(place, gpus_per_run))
        finally:
            places.put(place)

    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(execute, run): run for run in runs}
        try:
            for future in as_completed(started):
                yield started[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def visible_gpus(place: int, count: int) -> dict[str, str]:
    """The environment that shows a place its own GPUs; empty without any."""
    first = place * count
    gpus = ",".join(str(gpu) for gpu in range(first, first + count))
    return {"CUDA_VISIBLE_DEVICES": gpus} if count else {}


def slurm(runs: Iterable[Run], folder: Path, options: Mapping, cluster: str | None = None) -> list:
    """Submits each run as a job and returns the submitit jobs; does not wait.

    options: submitit's parameters (timeout_min, slurm_partition, slurm_gres, ...).
    Submitting the same run twice is harmless: the second waits, then finds it done.
    Raises ImportError naming the package to install.
    """
    try:
        import submitit
    except ImportError as error:
        raise ImportError("config.launcher='slurm' needs submitit: pip install submitit") from error
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    executor.update_parameters(**{key: value for key, value in options.items() if value != ""})
    return executor.map_array(execute_or_raise, list(runs))


def execute_or_raise(run: Run) -> str:
    """Makes the run; its name. Raises RuntimeError where it fails, so that Slurm knows."""
    if not run.execute(os.environ):
        raise RuntimeError(f"{run.name}: {run.error}")
    return run.name


def listing(runs: Sequence[Run], jobs: int) -> str:
    """Every run with its state, and what the missing ones will cost as far as done ones tell."""
    lines = [f"{run.state:8s} {run.name}" for run in runs]
    seconds = [read_summary(run.workdir)["seconds"] for run in runs if run.state == "done"]
    missing = sum(run.state != "done" for run in runs)
    states = collections.Counter(run.state for run in runs)
    lines.append(", ".join(f"{count} {state}" for state, count in states.items()))
    steps = sum(run.resolved().steps for run in runs if run.state != "done")
    cost = f"to do: {missing} runs, {steps:,} RL steps"
    if seconds and missing:
        each = sum(seconds) / len(seconds)
        cost += f"; at {each:.0f} s a run, as done ones took, {each * missing / jobs / 60:.0f} min"
    return "\n".join([*lines, cost])
