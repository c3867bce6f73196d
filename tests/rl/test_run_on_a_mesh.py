"""Eight devices do what one does: the same tokens, and the same loss up to summation order."""

import shutil

import pytest

from tests.rl import tiny_run
from trace_jax.analysis.run_directory import read_rollouts, read_summary

RUN = {"rl.staleness": 1, "checkpoint_every": 1, "samples_every": 1, "engine_noise": 0.0}
EIGHT = RUN | {"mesh.data": 4, "mesh.fsdp": 2}


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    with tiny_run.quick_compiles(tiny_run.compiled_programs(tmp_path_factory)):
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with the checkpoint of a warm-up on one device."""
    workdir = tmp_path_factory.mktemp("warmed_up")
    with tiny_run.one_device():
        tiny_run.go(workdir, {"steps": 0})
    return workdir / "checkpoints"


def test_a_run_on_eight_devices(checkpoints, tmp_path):
    one, eight = tmp_path / "one", tmp_path / "eight"
    for workdir in (one, eight):
        shutil.copytree(checkpoints, workdir / "checkpoints")
    with tiny_run.one_device():
        rows_of_one = tiny_run.go(one, RUN | {"steps": 2})
    tiny_run.go(eight, EIGHT | {"steps": 1})
    rows_of_eight = tiny_run.go(eight, EIGHT | {"steps": 2})  # resumes, queue and all
    assert read_summary(eight)["first_step"] == 1

    # Both rollouts were sampled by the first version.
    for step in (0, 1):
        assert read_rollouts(eight, step) == read_rollouts(one, step)
        mine, theirs = rows_of_eight[step], rows_of_one[step]
        assert mine["policy/staleness"] == theirs["policy/staleness"] == step
        assert mine["reward/mean"] == theirs["reward/mean"] > 0
        assert mine["guidance/bytes_per_token"] == theirs["guidance/bytes_per_token"]
    for name in ("train/loss", "train/grad_norm", "policy/entropy_nats"):
        assert rows_of_eight[0][name] == pytest.approx(rows_of_one[0][name], rel=1e-3, abs=1e-5)
    for row in (rows_of_eight[0], rows_of_one[0]):
        assert row["mismatch/code_rate"] == row["mismatch/route_rate"] == 0
    for name in ("eval/accuracy_fp4", "eval/accuracy_bf16"):
        assert rows_of_eight[0][name] == rows_of_one[0][name]
