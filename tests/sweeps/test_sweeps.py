"""A sweep runs what is missing, names what failed, and reports from run directories alone.

The runs here are of a command that takes no time; what it leaves is what a real run leaves.
"""

import dataclasses
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from configs.sweeps import base
from trace_jax.analysis.run_directory import RunDirectory
from trace_jax.sweeps import launch, report
from trace_jax.sweeps.runs import Run, last_line, runs_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
AXES = dict(method=("qat", "trace"), seed=(0, 1))
SHIPPED = sorted(
    path.stem for path in (ROOT / "configs/sweeps").glob("*.py") if path.stem != "base"
)
LEAVES_A_SUMMARY = """
import json, pathlib, sys
workdir, method, seed = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with (workdir / "attempts").open("a") as file:
    file.write("x")
if (workdir / "poison").exists():
    sys.exit("error: this run was made to fail")
values = {"seconds": 1.0, "after/accuracy_bf16": 0.9, "mean/reward/mean": 0.5}
values |= {"before/accuracy_fp4": 0.5, "after/accuracy_fp4": 0.7 + (method == "trace") / 10}
values |= {"mean/mismatch/code_rate": None, "mean/mismatch/logp_abs_mean": 0.1}
rows = [{"step": 0, "reward/mean": 0.1}, {"step": 1, "reward/mean": 0.2}]
(workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(workdir / "summary.json").write_text(json.dumps(values))
"""


class Quick(Run):
    """A run that only leaves a summary behind."""

    def command(self):
        method, seed = self.varied["method"], self.varied["seed"]
        return [sys.executable, "-c", LEAVES_A_SUMMARY, str(self.workdir), method, str(seed)]


def quick_runs(root):
    fields = [dataclasses.astuple(run) for run in runs_of(base.sweep(axes=AXES), root)]
    return [Quick(*field) for field in fields]


def attempts(run):
    path = run.workdir / "attempts"
    return len(path.read_text()) if path.exists() else 0


def poison(run):
    run.workdir.mkdir(parents=True)
    (run.workdir / "poison").touch()


def test_runs_are_the_product_of_the_axes_every_seed_last():
    runs = runs_of(base.sweep(axes=AXES, fixed=dict(rl=dict(staleness=1))), "sweep")
    names = ["method=qat,seed=0", "method=trace,seed=0", "method=qat,seed=1", "method=trace,seed=1"]
    assert [run.name for run in runs] == names
    assert [run.group for run in runs] == ["method=qat", "method=trace"] * 2
    assert runs[1].command()[1:] == [
        "-m",
        "experiments.rl",
        "--config=configs/tiny_cpu.py",
        "--workdir=sweep/method=trace,seed=0",
        "--config.rl.staleness=1",
        "--config.method=trace",
        "--config.seed=0",
    ]
    config = runs[1].resolved()
    assert (config.method, config.seed, config.rl.staleness) == ("trace", 0, 1)


def test_a_name_that_a_file_system_would_not_take_is_told_apart_by_a_hash():
    files = ("configs/a.py", "configs-a.py")
    runs = runs_of(base.sweep(axes=dict(config=files)), "sweep")
    names = [run.name for run in runs]
    assert names[1] == "config=configs-a.py"
    assert names[0].startswith("config=configs-a.py-")
    assert "/" not in names[0]
    long = runs_of(base.sweep(axes=dict(task=dict(path=("x" * 300, "x" * 301)))), "sweep")
    assert len({run.name for run in long}) == 2
    assert max(len(run.name) for run in long) < 140


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(axes=dict(seed=())), r"config\.axes\.seed=\(\)"),
        (dict(axes=dict(seed=(0, 0))), "twice"),
        (dict(axes=dict(seed=(0,)), fixed=dict(seed=1)), "is an axis too"),
    ],
)
def test_bad_axes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        runs_of(base.sweep(**change), "sweep")


def test_unknown_keys_of_a_sweep_are_named():
    config = base.sweep(axes=AXES).to_dict() | {"job": 1}
    with pytest.raises(ValueError, match=r"unknown \['job'\]"):
        runs_of(config, "sweep")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (dict(methode=("qat",)), "run methode=qat: methode='qat' does not fit"),
        (dict(seed=("one",)), "run seed=one: seed='one' does not fit"),
        (dict(method=("qatt",)), "run method=qatt: method='qatt' is unknown"),
        (dict(config=("configs/nowhere.py",)), "no such file"),
    ],
)
def test_a_wrong_run_is_found_before_any_starts(axes, message):
    (run,) = runs_of(base.sweep(axes=axes), "sweep")
    with pytest.raises(ValueError, match=message):
        run.check()


@pytest.mark.parametrize("name", SHIPPED)
def test_every_run_of_a_shipped_sweep_resolves(name, tmp_path):
    runs = runs_of(importlib.import_module(f"configs.sweeps.{name}").get_config(), tmp_path)
    assert len(runs) > 1
    for run in runs:
        run.check()


def test_a_done_run_of_another_configuration_is_not_taken_for_this_one(tmp_path):
    (run,) = runs_of(base.sweep(axes=dict(seed=(3,))), tmp_path)
    with RunDirectory(run.workdir) as directory:
        other = run.resolved()
        other.rl.learning_rate = 0.5
        directory.write_config(other.to_dict())
        directory.write_summary({})
    with pytest.raises(ValueError, match=r"rl\.learning_rate: 0\.5 there, 0\.0003 now"):
        run.check()


def test_only_what_is_missing_is_run_and_a_failure_stops_no_other(tmp_path):
    runs = quick_runs(tmp_path)
    poison(runs[1])
    outcomes = {run.name: done for run, done in launch.local(runs, jobs=2)}
    assert [outcomes[run.name] for run in runs] == [True, False, True, True]
    assert runs[1].error == "error: this run was made to fail"
    assert [run.state for run in runs] == ["done", "failed", "done", "done"]

    (runs[1].workdir / "poison").unlink()
    again = [run for run in runs if run.state != "done"]
    assert again == [runs[1]]
    assert list(launch.local(again, jobs=1)) == [(runs[1], True)]
    assert [attempts(run) for run in runs] == [1, 2, 1, 1]
    assert not (runs[1].workdir / "failed.json").exists()


def test_a_run_waits_for_the_orphan_of_a_killed_sweep(tmp_path):
    """Two processes never write one run directory; the second finds the run done."""
    run = quick_runs(tmp_path)[0]
    run.workdir.mkdir()
    hold = (
        "import fcntl, pathlib, sys, time\n"
        "workdir = pathlib.Path(sys.argv[1])\n"
        "lock = (workdir / 'lock').open('w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(1); (workdir / 'summary.json').write_text('{}')"
    )
    command = [sys.executable, "-c", hold, str(run.workdir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as orphan:
        assert orphan.stdout.readline() == b"held\n"
        assert run.execute(os.environ)
    assert attempts(run) == 0


def test_the_lock_outlives_a_killed_sweep_as_long_as_its_run(tmp_path):
    script = (
        "import sys, os, pathlib\n"
        "from trace_jax.sweeps.runs import Run\n"
        "class Slow(Run):\n"
        "    def command(self):\n"
        '        code = \'import time, sys; time.sleep(3); open(sys.argv[1], "w").write("{}")\'\n'
        "        return [sys.executable, '-c', code, str(self.workdir / 'summary.json')]\n"
        "Slow('', {}, {'seed': 0}, pathlib.Path(sys.argv[1])).execute(os.environ)\n"
    )
    sweep = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT)
    log = tmp_path / "seed=0" / "log.txt"
    while not log.exists():
        time.sleep(0.05)
    time.sleep(0.5)  # the child is started
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    waits = Quick("", {}, {"seed": 0}, tmp_path)
    assert waits.state == "missing"
    assert waits.execute(os.environ)  # would fail for want of a method if it did not wait


def test_each_place_sees_its_own_gpus():
    assert launch.visible_gpus(0, 0) == {}
    assert launch.visible_gpus(3, 2) == {"CUDA_VISIBLE_DEVICES": "6,7"}


def test_slurm_jobs_are_runs(tmp_path):
    """submitit's own local executor stands in for Slurm's."""
    pytest.importorskip("submitit")
    runs = quick_runs(tmp_path)[:2]
    poison(runs[1])
    jobs = launch.slurm(runs, tmp_path / "jobs", {"timeout_min": 2}, cluster="local")
    assert jobs[0].result() == runs[0].name
    assert "made to fail" in str(jobs[1].exception())
    assert [run.state for run in runs] == ["done", "failed"]


def test_the_last_line_of_a_progress_bar(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("rl: 1%\rrl: 2%\r\nerror: out of luck\n\n")
    assert last_line(log) == "error: out of luck"
    log.write_text("")
    assert last_line(log) == ""


def test_an_interval_is_students():
    """Of 1, 2, 3: standard error 1 / sqrt(3), quantile 4.302653 at two degrees of freedom."""
    assert report.interval([1, 2, 3]).mean == 2
    np.testing.assert_allclose(report.interval([1, 2, 3]).half_width, 4.302653 / 3**0.5, rtol=1e-6)
    assert str(report.interval([0.5])) == "0.5"


def test_the_report_names_groups_intervals_and_what_is_not_done(tmp_path):
    runs = quick_runs(tmp_path)
    poison(runs[3])
    list(launch.local(runs[1:], jobs=2))
    text = report.write(runs, tmp_path)
    lines = text.splitlines()
    assert lines[4].startswith("| method=qat | 1 of 2 | 0.5 | 0.7 | 0.2 | 0.9 | 0.5 | - | 0.1 |")
    assert lines[5].startswith("| method=trace | 1 of 2 | 0.5 | 0.8 | 0.3 |")
    assert "- missing: `method=qat,seed=0`" in text
    assert "- failed: `method=trace,seed=1`: error: this run was made to fail" in text
    for name in ("accuracy", "curves"):
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000
    rows = json.loads((tmp_path / "report.json").read_text())
    assert [row["state"] for row in rows] == ["missing", "done", "done", "failed"]


def test_the_listing_tells_states_and_cost(tmp_path):
    runs = quick_runs(tmp_path)
    list(launch.local(runs[:1], jobs=1))
    text = launch.listing(runs, jobs=2)
    assert text.splitlines()[0] == "done     method=qat,seed=0"
    assert text.endswith("to do: 3 runs, 450 RL steps; at 1 s a run, as done ones took, 0 min")
