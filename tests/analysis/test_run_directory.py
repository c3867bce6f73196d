"""The run directory survives kills and resumes, and every file in it is strict JSON."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX import SummaryWriter

from trace_jax.analysis import run_directory
from trace_jax.analysis.run_directory import RunDirectory, read_metrics

CONFIG = {
    "method": "trace",
    "steps": 10,
    "rl": {"clip_high": 0.28, "group_size": 8},
    "mesh": (1, 8),
}


def strict_loads(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def append(workdir, steps):
    with RunDirectory(workdir) as run:
        for step in steps:
            run.append_metrics(step, {"reward/mean": step / 3})


def steps_of(workdir):
    return [row["step"] for row in read_metrics(workdir)]


def test_metrics_keep_every_bit_and_every_dtype(tmp_path):
    third = np.float32(1) / np.float32(3)
    with RunDirectory(tmp_path) as run:
        run.append_metrics(
            0,
            {
                "a/float32": jnp.asarray(third),
                "a/bfloat16": jnp.asarray(third, jnp.bfloat16),
                "a/int": np.int32(7),
                "a/python": 0.1,
                "a/none": None,
            },
        )
    (row,) = read_metrics(tmp_path)
    assert np.float32(row["a/float32"]) == third
    assert row["a/bfloat16"] == 0.333984375
    assert row == {"step": 0, **row}
    assert (row["a/int"], row["a/python"], row["a/none"]) == (7, 0.1, None)
    assert isinstance(row["a/int"], int)


def test_row_is_on_disk_when_append_returns(tmp_path):
    run = RunDirectory(tmp_path)
    run.append_metrics(0, {"reward/mean": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "reward/mean": 0.5}\n'
    run.close()


def test_kill_loses_no_finished_row(tmp_path):
    program = textwrap.dedent(f"""
        from trace_jax.analysis.run_directory import RunDirectory
        run = RunDirectory({str(tmp_path)!r})
        for step in range(10**6):
            run.append_metrics(step, {{"reward/mean": step / 3}})
            print(step, flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) == 20:
            break
    os.kill(process.pid, signal.SIGKILL)
    reported = int((line + process.stdout.read()).split()[-1])
    process.wait()
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) > reported
    assert all(row["reward/mean"] == row["step"] / 3 for row in rows)


@pytest.mark.parametrize("torn", ['{"step": 3, "rew', '{"step": 3, "reward/mean": 1.0}', "{"])
def test_torn_last_line_is_not_read_and_not_appended_to(tmp_path, torn):
    append(tmp_path, range(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert steps_of(tmp_path) == [0, 1, 2]
    append(tmp_path, [3])
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_damage_elsewhere_is_an_error_that_names_the_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not a JSON object with a step: '{\"st"):
        read_metrics(tmp_path)


def test_truncation_on_resume(tmp_path):
    append(tmp_path, range(5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "re')
    with RunDirectory(tmp_path) as run:
        assert run.truncate_metrics(before_step=3) == 3
        assert steps_of(tmp_path) == [0, 1, 2]
        assert run.truncate_metrics(before_step=3) == 0
        run.append_metrics(3, {"reward/mean": 1.0})
    assert steps_of(tmp_path) == [0, 1, 2, 3]
    assert RunDirectory(tmp_path / "new").truncate_metrics(before_step=0) == 0


def test_a_step_has_one_row(tmp_path):
    append(tmp_path, range(3))
    with pytest.raises(ValueError, match=r"got step 2 after step 2; call truncate_metrics\(2\)"):
        append(tmp_path, [2])


def test_tensorboard_mirrors_the_rows_and_purges_on_resume(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        run_directory,
        "SummaryWriter",
        lambda folder, purge_step: calls.append(purge_step) or SummaryWriter(folder),
    )
    monkeypatch.setattr(SummaryWriter, "add_scalar", lambda self, *point: calls.append(point))
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {"reward/mean": 0.5, "eval/note": None})
        run.truncate_metrics(0)
        run.append_metrics(0, {"reward/mean": math.inf})
    assert calls == [0, ("reward/mean", 0.5, 0), 0, ("reward/mean", math.inf, 0)]
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path):
    values = {"a/nan": jnp.asarray(jnp.nan), "a/inf": math.inf, "a/minus": np.float32(-np.inf)}
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, values)
        run.write_summary({"final": values})
        run.write_config({"cap": math.inf})
        run.write_config({"cap": math.inf})
    row = strict_loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"step": 0, "a/nan": "NaN", "a/inf": "Infinity", "a/minus": "-Infinity"}
    strict_loads((tmp_path / "summary.json").read_text())
    for back in (read_metrics(tmp_path)[0], run_directory.read_summary(tmp_path)["final"]):
        assert math.isnan(back["a/nan"])
        assert (back["a/inf"], back["a/minus"]) == (math.inf, -math.inf)
    assert run_directory.read_config(tmp_path) == {"cap": math.inf}


def test_config_resumes_with_more_steps(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_config(CONFIG)
    run.write_config(CONFIG | {"steps": 20})
    assert run_directory.read_config(tmp_path) == CONFIG | {"steps": 20, "mesh": [1, 8]}


def test_config_mismatch_names_every_key_and_leaves_the_file(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_config(CONFIG)
    changed = {"steps": 20, "rl": {"clip_high": 0.3, "group_size": 8}, "mesh": (1, 8), "seed": 1}
    with pytest.raises(ValueError) as error:
        run.write_config(changed)
    assert str(error.value) == (
        f"{tmp_path}/config.json is of a run with another configuration:\n"
        "  method: 'trace' there, absent now\n"
        "  rl.clip_high: 0.28 there, 0.3 now\n"
        "  seed: absent there, 1 now\n"
        "set these back to resume that run, or name another --workdir "
        "(a resumed run may change: steps)"
    )
    assert run_directory.read_config(tmp_path)["rl"]["clip_high"] == 0.28


def test_config_may_differ_covers_what_lies_below_a_key_only(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_config(CONFIG | {"rl_other": 1})
    other = CONFIG | {"rl": {"clip_high": 0.3, "group_size": 8}, "rl_other": 1}
    run.write_config(other, may_differ=("rl",))
    with pytest.raises(ValueError, match="rl_other: 1 there, 2 now"):
        run.write_config(other | {"rl_other": 2}, may_differ=("rl",))


def test_what_json_cannot_hold_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"model.dtype: .* which JSON cannot hold"):
        RunDirectory(tmp_path).write_config({"model": {"dtype": object()}})
    assert not (tmp_path / "config.json").exists()


def test_summary_is_replaced_whole_or_not_at_all(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_summary({"reward": 0.5})
    with pytest.raises(TypeError):
        run.write_summary({"reward": object()})
    assert run_directory.read_summary(tmp_path) == {"reward": 0.5}
    assert not list(tmp_path.glob(".*"))


def test_rollouts_round_trip_any_text(tmp_path):
    rows = [{"completion": "3 +\n4 =\u2028 “7”", "reward": 1.0, "tokens": np.arange(3)}]
    path = RunDirectory(tmp_path).write_rollouts(7, rows)
    assert path == tmp_path / "rollouts" / "step_000007.jsonl"
    assert run_directory.read_rollouts(tmp_path, 7) == [rows[0] | {"tokens": [0, 1, 2]}]
