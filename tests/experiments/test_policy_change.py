"""The command that tells a policy's change from rounding: every row is there, and 0 is 0."""

import json

import pytest

from experiments import policy_change as command
from tests.rl import tiny_run
from trace_jax.analysis import policy_change, policy_change_report
from trace_jax.analysis.policy_change import BF16, CODES, FLOAT32, FP4, FP4_MEAN, LOW_BIT, UNGUIDED

SHORT = {
    "LEARNING_RATES": (1e-3,),
    "UPDATES": (0, 1, 2),
    "STALENESS": (1,),
    "NOISE": (1e-6, 1e-1),
    "NOISE_DRAWS": 1,
    "COPIES": 2,
    "TRAINED": {
        "qat": policy_change.TRAINED["qat"],
        "low bit, first update only": policy_change.TRAINED["low bit, first update only"],
    },
}


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    programs = tiny_run.compiled_programs(tmp_path_factory)
    with (
        tiny_run.quick_compiles(programs),
        tiny_run.one_device(),
        pytest.MonkeyPatch.context() as p,
    ):
        for name, value in SHORT.items():
            p.setattr(policy_change, name, value)
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    made = tmp_path_factory.mktemp("policy_change")
    command.main(tiny_run.config({"rollout.prompts": 8}), made)
    return made


@pytest.fixture(scope="module")
def rows(workdir):
    return json.loads((workdir / "policy_change.json").read_text())


def of(rows, moved_by, **said):
    """The rows of one kind of move that say this."""
    kind = [row for row in rows if row["moved_by"] == moved_by]
    return [row for row in kind if all(row.get(key) == value for key, value in said.items())]


def test_weights_that_did_not_move_change_no_log_prob_under_any_view(rows):
    still = of(rows, "updates", amount=0)
    assert {row["view"] for row in still} == set(policy_change_report.VIEWS)
    for row in still:
        assert row["weight_change"] == row["mean"] == row["abs_mean"] == row["outside"] == 0
        assert row["fp4_slope"] is row["bf16_correlation"] is row["mean_slope"] is None


def test_every_move_was_scored_under_every_view(rows):
    views = len(policy_change_report.VIEWS)
    assert len(of(rows, "noise")) == 2 * views
    assert len(of(rows, "updates")) == 2 * 3 * views
    assert len(of(rows, "staleness")) == 1 * views  # of qat alone
    for row in of(rows, "updates", amount=2):
        assert row["weight_change"] > 0
        assert row["abs_mean"] > 0
        assert 0 <= row["outside"] <= 1


def test_a_view_answers_itself_fully(rows):
    for name, key in ((FP4, "fp4"), (BF16, "bf16")):
        for row in of(rows, "updates", amount=2, view=name):
            assert row[f"{key}_slope"] == pytest.approx(1)
            assert row[f"{key}_correlation"] == pytest.approx(1)


def test_noise_below_the_last_bit_moves_an_unquantized_policy_by_its_own_size(rows):
    small, large = (of(rows, "noise", amount=size, view=FLOAT32)[0] for size in (1e-6, 1e-1))
    assert 0 < small["abs_mean"] < 1e-4 < large["abs_mean"]


def test_guidance_follows_the_rollout_when_the_weights_hardly_move(rows):
    moved = lambda view: of(rows, "noise", amount=1e-1, view=view)[0]["abs_mean"]
    assert moved(CODES) < moved(UNGUIDED)
    assert moved(CODES) <= moved(LOW_BIT)


def test_tables_and_figure_come_from_the_rows_alone(workdir, rows):
    text = (workdir / "policy_change.md").read_text()
    assert text == policy_change_report.markdown(rows) + "\n"
    heads = [line for line in text.splitlines() if line.startswith("| trained with")]
    assert len(heads) == 5
    assert FP4_MEAN in heads[0]
    assert (workdir / "figures/policy_change.png").stat().st_size > 1000
    assert len(policy_change_report.figure(rows).axes) == 4
