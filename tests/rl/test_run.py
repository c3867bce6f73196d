"""The run under every method, as a user meets it: what it writes, and what its numbers must obey.

The configuration is configs/tiny_cpu.py at toy sizes (tiny_run.py); nothing is replaced or faked.
"""

import collections
import json
import math
import re
import shutil

import jax
import pytest

from tests.rl import tiny_run
from trace_jax.analysis.run_directory import read_config, read_metrics, read_rollouts, read_summary
from trace_jax.rl import methods, run
from trace_jax.training.checkpoint import Checkpoints

NAMES = (  # the metrics that the design promises
    "reward/mean eval/accuracy_fp4 eval/accuracy_bf16 mismatch/code_rate mismatch/scale_rate "
    "mismatch/d_act mismatch/logp_abs_mean mismatch/logp_abs_max mismatch/kl_k3_nats "
    "mismatch/route_rate mismatch/ess guidance/bytes_per_token guidance/out_of_bracket_rate "
    "policy/entropy_nats policy/staleness rollout/tokens_per_s time/rollout_s time/train_s "
    "time/sync_s"
).split()
STEPS = tiny_run.SMALL["steps"]
ROUNDING = {"mismatch/code_rate", "mismatch/scale_rate", "mismatch/d_act"}
GUIDANCE = {"guidance/bytes_per_token", "guidance/out_of_bracket_rate"}
ABSENT = {
    "bf16": ROUNDING | GUIDANCE,
    "fp4_rollout": GUIDANCE,
    "qat": GUIDANCE,
    "trace": set(),
    "trace_full": set(),
}
# Guided runs go without emulated noise: their two sides must then agree exactly.
TRACE, TRACE_FULL = ({"method": m, "engine_noise": 0.0} for m in ("trace", "trace_full"))
RUNS = {m: {"method": m} for m in ABSENT} | {"trace": TRACE, "trace_full": TRACE_FULL}
COMPILED = collections.Counter()


@jax.monitoring.register_event_duration_secs_listener
def count(event, seconds, **details):
    COMPILED["programs"] += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    programs = tiny_run.compiled_programs(tmp_path_factory)
    with tiny_run.quick_compiles(programs), tiny_run.one_device():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """workdir of a finished run of a method, made once."""
    made = {}

    def of(method):
        if method not in made:
            made[method] = tmp_path_factory.mktemp(method)
            tiny_run.go(made[method], RUNS[method])
        return made[method]

    return of


def newest(workdir):
    checkpoints = Checkpoints(workdir / "checkpoints")
    try:
        return checkpoints.latest()
    finally:
        checkpoints.close()


def test_the_table_of_methods_is_covered():
    assert methods.METHODS.keys() == ABSENT.keys() == RUNS.keys()


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_row_holds_every_metric(finished, method):
    rows = read_metrics(finished(method))
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(set(NAMES) <= row.keys() for row in rows)
    evaluated = {"eval/accuracy_fp4", "eval/accuracy_bf16"}
    for row in rows[:-1]:
        absent = ABSENT[method] | (evaluated if row["step"] % 2 else set())
        assert {name for name in NAMES if row[name] is None} == absent
        assert all(math.isfinite(value) for value in row.values() if value is not None)
        assert row["policy/staleness"] == 0
        assert min(row["time/rollout_s"], row["time/train_s"], row["time/sync_s"]) > 0
    # The last row is the closing evaluation; no step was taken there.
    assert {name for name in NAMES if rows[-1][name] is not None} == evaluated


@pytest.mark.parametrize("method", methods.METHODS)
def test_the_run_directory_is_complete(finished, method):
    workdir = finished(method)
    assert read_config(workdir) == json.loads(tiny_run.config(RUNS[method]).to_json())
    assert (workdir / "figures/run.png").stat().st_size > 1000
    assert newest(workdir) == STEPS
    assert sorted(p.name for p in (workdir / "rollouts").iterdir()) == [
        "step_000000.jsonl",
        "step_000002.jsonl",
    ]
    rows, summary = read_metrics(workdir), read_summary(workdir)
    for name in ("accuracy_fp4", "accuracy_bf16"):
        assert summary[f"before/{name}"] == rows[0][f"eval/{name}"]
        assert summary[f"after/{name}"] == rows[-1][f"eval/{name}"]
    rewards = [row["reward/mean"] for row in rows[:-1]]
    assert summary["mean/reward/mean"] == pytest.approx(sum(rewards) / STEPS)


def test_sampled_text_is_what_was_rewarded(finished):
    workdir = finished("trace")
    samples = read_rollouts(workdir, 0)
    assert len(samples) == 16
    assert len({sample["prompt"] for sample in samples}) == 4
    for sample in samples:
        first, second = int(sample["prompt"][0]), int(sample["prompt"][1])
        assert sample["answer"] == f"{first}{(first + second) % 10}"
        assert sample["reward"] == (sample["completion"].strip() == sample["answer"])
    mean = sum(sample["reward"] for sample in samples) / 16
    assert 0 < mean == read_metrics(workdir)[0]["reward/mean"] < 1


def test_something_is_learned_from(finished):
    """Otherwise the runs here would compare zeros."""
    rows = read_metrics(finished("trace"))[:-1]
    assert all(row["train/grad_norm"] > 0 and row["reward/groups_kept"] > 0 for row in rows)


def test_methods_start_from_the_same_model_and_part_in_the_mismatch(finished):
    first = {method: read_metrics(finished(method))[0] for method in methods.METHODS}
    assert len({row["eval/accuracy_fp4"] for row in first.values()}) == 1
    assert len({row["eval/accuracy_bf16"] for row in first.values()}) == 1
    gap = {method: row["mismatch/logp_abs_mean"] for method, row in first.items()}
    codes = {method: row["mismatch/code_rate"] for method, row in first.items()}
    assert codes["fp4_rollout"] > codes["qat"] > 0.01
    assert max(gap["trace"], gap["trace_full"]) < gap["qat"] / 100
    assert gap["qat"] < gap["fp4_rollout"]


@pytest.mark.parametrize(("method", "bits"), [("trace", 1), ("trace_full", 4)])
def test_guidance_costs_what_the_formula_says(finished, method, bits):
    widths = [32, 1 * 16, 1 * 16, 2 * 16, 32]  # attention/in, k, v, out, experts/in
    rows_a_token = 1 + 1 + 1 + 1 + 1  # each with a float32 outer scale; K and V have one head
    layers = 2
    formula = layers * (sum(width * (bits + 8 / 16) / 8 for width in widths) + 4 * rows_a_token)
    rows = read_metrics(finished(method))[:-1]
    assert {row["guidance/bytes_per_token"] for row in rows} == {formula}


class Watched(run.Loop):
    """The loop, saying before each update how many programs were compiled until then."""

    compiled: list

    def update(self, state, batch):
        self.compiled.append(COMPILED["programs"])
        return super().update(state, batch)

    def close(self, *arguments):
        self.compiled.append(COMPILED["programs"])
        return super().close(*arguments)


def test_a_finished_run_continues_and_nothing_compiles_twice(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "Loop", Watched)
    monkeypatch.setattr(Watched, "compiled", [], raising=False)
    whole = tiny_run.go(tmp_path / "whole", TRACE | {"steps": 7})
    assert len(Watched.compiled) == 8
    assert Watched.compiled[2:] == [Watched.compiled[2]] * 6
    shutil.copytree(finished("trace"), tmp_path / "continued")
    continued = tiny_run.go(tmp_path / "continued", TRACE | {"steps": 7})
    assert tiny_run.untimed(continued) == tiny_run.untimed(whole)
    assert read_summary(tmp_path / "continued")["first_step"] == STEPS
    assert newest(tmp_path / "continued") == 7


class Trainer:
    """A trainer that notes whether each update was guided."""

    def __init__(self, trainer):
        self.trainer, self.transformation, self.guided = trainer, trainer.transformation, []

    def update(self, state, batch):
        self.guided.append(batch.rollout.guidance is not None)
        return self.trainer.update(state, batch)


def test_guidance_is_dropped_after_the_first_update_on_a_rollout(tmp_path, monkeypatch):
    class Noting(run.Loop):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.trainer = trainers.append(Trainer(self.trainer)) or trainers[-1]

    trainers = []
    monkeypatch.setattr(run, "Loop", Noting)
    two = {"rl.updates_per_rollout": 2, "rl.guided_updates": 1, "steps": 2}
    rows = tiny_run.go(tmp_path, TRACE | two)[:-1]
    assert trainers[0].guided == [True, False, True, False]
    for row in rows:
        check_self_consistent(row)
        # The second update sees the policy that the first one moved.
        assert abs(row["policy/importance_ratio_last_update"] - 1) > 1e-5
        assert 0 <= row["policy/clipped_share_last_update"] <= 1


def test_the_trainers_own_old_log_probs(tmp_path):
    """The ratio of the first update is 1 whatever the mismatch; that of the second one is not."""
    unguided = {"method": "fp4_rollout", "steps": 2, "rl.updates_per_rollout": 2}
    for row in tiny_run.go(tmp_path, unguided | {"rl.old_log_probs": "trainer"})[:-1]:
        assert row["mismatch/logp_abs_mean"] > 1e-3
        assert row["policy/importance_ratio"] == pytest.approx(1, abs=1e-6)
        assert abs(row["policy/importance_ratio_last_update"] - 1) > 1e-5


def test_rollouts_one_version_old(tmp_path):
    one_old = {"rl.staleness": 1, "steps": 3, "debug_nans": True}  # which a good run survives
    rows = tiny_run.go(tmp_path, TRACE_FULL | one_old)[:-1]
    assert [row["policy/staleness"] for row in rows] == [0, 1, 1]
    check_self_consistent(rows[0])
    gaps = [row["mismatch/logp_abs_mean"] for row in rows]
    assert min(gaps[1:]) > 100 * gaps[0]


@pytest.mark.parametrize("method", ["trace", "trace_full"])
def test_a_guided_trainer_follows_its_rollout_exactly(finished, method):
    for row in read_metrics(finished(method))[:-1]:
        check_self_consistent(row)


def check_self_consistent(row):
    """The trainer has the rollout's weights and kernels: codes and routes agree exactly."""
    for name in ("code_rate", "scale_rate", "route_rate"):
        assert row[f"mismatch/{name}"] == 0
    assert row["guidance/out_of_bracket_rate"] == 0
    assert row["mismatch/d_act"] < 1e-6
    assert row["mismatch/logp_abs_max"] < 1e-5
    assert row["policy/importance_ratio"] == pytest.approx(1, abs=1e-6)


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory):
    """workdir of a run that ended before its first step."""
    workdir = tmp_path_factory.mktemp("warmed_up")
    tiny_run.go(workdir, TRACE | {"steps": 0})
    return workdir


def test_no_steps_are_a_warm_up_and_its_evaluation(warmed_up, finished):
    (row,) = read_metrics(warmed_up)
    assert newest(warmed_up) == row["step"] == 0
    for name in ("eval/accuracy_fp4", "eval/accuracy_bf16"):
        assert row[name] == read_metrics(finished("trace"))[0][name]
    assert (warmed_up / "figures/run.png").exists()


@pytest.mark.parametrize(
    ("every", "message"),
    [
        # Finite, but they overflow a norm: seen before they replace the good checkpoint.
        (1, "parameter norm is inf at step 1; the last checkpoint is intact"),
        (9, "train/grad_norm is nan at step 1; the last checkpoint is intact"),
    ],
)
def test_a_run_that_diverges_keeps_its_last_good_checkpoint(warmed_up, tmp_path, every, message):
    shutil.copytree(warmed_up / "checkpoints", tmp_path / "checkpoints")
    diverging = TRACE | {"rl.learning_rate": 1e30, "checkpoint_every": every}
    with pytest.raises(FloatingPointError, match=message):
        tiny_run.go(tmp_path, diverging)
    assert newest(tmp_path) == 0
    # It is still good, and so is what was written until then.
    (tmp_path / "config.json").unlink()
    good = tiny_run.go(tmp_path, TRACE | {"steps": 1})
    assert math.isfinite(good[0]["train/loss"])


@pytest.mark.parametrize("debug_nans", [False, True])
def test_a_warm_up_that_diverges_stops(tmp_path, debug_nans):
    diverging = {"warmup.learning_rate": 1e38, "debug_nans": debug_nans}
    message = r"invalid value \(nan\)" if debug_nans else "warm-up loss is nan at step 39"
    with pytest.raises(FloatingPointError, match=message):
        tiny_run.go(tmp_path, diverging)
    assert newest(tmp_path) is None
    assert not jax.config.jax_debug_nans  # the run leaves the process as it was
    # There is nothing to resume, so the configuration may be mended in the same directory.
    if not debug_nans:
        tiny_run.go(tmp_path, {"steps": 0})


def test_a_resumed_run_keeps_its_configuration(finished, tmp_path):
    shutil.copytree(finished("trace"), tmp_path / "run")
    with pytest.raises(ValueError, match="with another configuration") as error:
        tiny_run.go(tmp_path / "run", TRACE | {"rl.clip_low": 0.1, "method": "qat"})
    lines = str(error.value).splitlines()
    assert lines[1:3] == [
        "  method: 'trace' there, 'qat' now",
        "  rl.clip_low: 0.2 there, 0.1 now",
    ]
    assert lines[3].startswith("set these back to resume that run, or name another --workdir")
    assert read_metrics(tmp_path / "run") == read_metrics(finished("trace"))


def test_a_checkpoint_of_another_shape_is_refused(warmed_up, tmp_path):
    shutil.copytree(warmed_up / "checkpoints", tmp_path / "checkpoints")
    message = (
        "checkpoint step 0: state/params/layers_0/0/experts/down is (2, 4, 32, 32) there, but the "
        "model wants (2, 4, 32, 64); use the configuration it was made with, or another --workdir"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_run.go(tmp_path, {"model.moe_intermediate_size": 64})
