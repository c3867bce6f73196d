"""A run that is killed at any moment and started again is the run that was not killed."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.rl import tiny_run
from trace_jax.analysis.run_directory import read_metrics, read_summary

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS, EVERY, KILL_AT = 40, 4, 10
RUN = tiny_run.SMALL | {
    "steps": STEPS,
    "checkpoint_every": EVERY,
    "evaluation.every": 8,
    "rl.staleness": 1,  # so that the queue must survive too
}
DEADLINE = 300  # seconds, for a machine with much else to do


def start(workdir, programs):
    """The command that a user types, on one device."""
    command = [sys.executable, "-m", "experiments.rl", f"--workdir={workdir}"]
    command += [f"--config.{key}={value}" for key, value in RUN.items()]
    environment = os.environ | {
        "XLA_FLAGS": "",
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        **{name.upper(): str(value) for name, value in tiny_run.QUICK.items()},
    }
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process):
    """Its stdout, once it ended well."""
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err[-2000:]
    return out


def kill_at(process, workdir, rows):
    """Kills, with no warning, once so many rows of metrics are written."""
    metrics, deadline = workdir / "metrics.jsonl", time.monotonic() + DEADLINE
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < rows:
        assert process.poll() is None, process.stderr.read()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == -signal.SIGKILL


def half_write_checkpoint(checkpoints):
    """Leaves what a kill in the middle of saving leaves: an uncommitted copy, parts missing."""
    newest = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
    torn = checkpoints / f"{newest + EVERY}.orbax-checkpoint-tmp"
    shutil.copytree(checkpoints / f"{newest}", torn)
    shutil.rmtree(torn / "queue")
    (torn / "saved").rename(torn / "saved.orbax-checkpoint-tmp")


@pytest.mark.slow
def test_kill_nine_and_start_again(tmp_path, tmp_path_factory):
    programs = tiny_run.compiled_programs(tmp_path_factory)
    printed = finish(start(tmp_path / "whole", programs))
    assert "after/accuracy_fp4" in printed

    killed = tmp_path / "killed"
    kill_at(start(killed, programs), killed, KILL_AT)
    assert KILL_AT <= len(read_metrics(killed)) <= STEPS
    assert not (killed / "summary.json").exists()
    half_write_checkpoint(killed / "checkpoints")
    finish(start(killed, programs))

    whole, again = (tiny_run.untimed(read_metrics(tmp_path / n)) for n in ("whole", "killed"))
    assert len(whole) == STEPS + 1
    assert again == whole
    assert {row["policy/staleness"] for row in whole[1:-1]} == {1}
    resumed_at = read_summary(killed)["first_step"]
    assert resumed_at >= KILL_AT - EVERY
    assert resumed_at % EVERY == 0
    files = [sorted((tmp_path / name / "rollouts").iterdir()) for name in ("whole", "killed")]
    assert [f.read_text() for f in files[0]] == [f.read_text() for f in files[1]]
    steps = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert steps == [f"{STEPS - EVERY}", f"{STEPS}"]  # nothing half-written is left
