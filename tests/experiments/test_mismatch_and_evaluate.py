"""The commands that look at a checkpoint: how far the sides are apart, what would be deployed."""

import json
import math
import shutil

import jax
import pytest

from experiments import evaluate, mismatch
from tests.rl import tiny_run
from trace_jax.analysis import mismatch_table
from trace_jax.analysis.run_directory import read_metrics
from trace_jax.models import checkpoint_hf, decoder
from trace_jax.rl import settings


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    programs = tiny_run.compiled_programs(tmp_path_factory)
    with tiny_run.quick_compiles(programs), tiny_run.one_device():
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run that ended before its first step."""
    made = tmp_path_factory.mktemp("warmed_up")
    tiny_run.go(made, {"steps": 0})
    return made


@pytest.fixture(scope="module")
def results(workdir):
    """Both tables at 1% of emulated noise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mismatch_table, "NOISE", (0.01,))
        mismatch.main(tiny_run.config({"engine_noise": 0.01}), workdir, methods=True)
    return json.loads((workdir / "mismatch.json").read_text())


@pytest.fixture(scope="module")
def rows(results):
    """The table of methods, by name of the row."""
    return {row["method"]: row for row in results["methods"] if row["noise"] is not None}


def test_the_shares_add_up_to_the_whole_gap(results, workdir):
    for trainer, sources in (("BF16", 6), ("QAT", 5)):
        rows = [row for row in results["sources"] if row["trainer"] == trainer]
        assert len(rows) == sources + 2
        *shares, none, whole = rows
        for name in ("gap", "d_act"):
            total = sum(row[name]["share"] for row in shares)
            assert none[name]["share"] < 1e-5  # aligned, the trainer is the rollout
            assert total == pytest.approx(whole[name]["share"] - none[name]["share"], rel=1e-7)
            for row in rows:
                assert row[name]["low"] <= row[name]["share"] <= row[name]["high"]
    assert (workdir / "figures/attribution.png").stat().st_size > 1000


def test_what_the_other_parts_measure_is_the_same_number(results, rows):
    """QAT under the other engine, by four ways."""
    *_, emulated = results["engines"]
    qat, trace = rows["qat"], rows["trace, all layers"]
    assert emulated["engine"] == "emulated: 1.0% noise"
    assert emulated["gap"] == pytest.approx(qat["logp_abs_mean"], rel=1e-5)
    assert emulated["code_rate"] == pytest.approx(qat["code_rate"], rel=1e-5)
    for site, rates in results["by_site_and_layer"].items():  # both layers have equally many
        assert sum(rates) / 2 == pytest.approx(qat["code_rate_by_site"][site], rel=1e-5)
    count = results["by_position"]["sequences"]
    for method, row in (("qat", qat), ("trace, all layers", trace)):
        gaps = results["by_position"]["gap"][method]
        mean = sum(n * gap for n, gap in zip(count, gaps, strict=True)) / sum(count)
        assert mean == pytest.approx(row["logp_abs_mean"], rel=1e-5)


def test_an_error_grows_from_the_layer_where_it_is_made_unless_guided(results):
    growth = {(row["method"], row["noisy_layer"]): row for row in results["growth"]}
    first, last = (growth["qat", layer]["code_rate"] for layer in (0, 1))
    assert 0 < first[0] < first[1]
    assert last[0] == 0 < last[1] < first[1]
    for layer in (0, 1):
        assert growth["trace, all layers", layer]["code_rate"] == [0, 0]


def test_the_table_has_every_method_and_every_number(rows, workdir):
    assert list(rows) == [
        "bf16 (BF16 rollout)",
        "fp4_rollout",
        "qat",
        "qat, routes replayed",
        "trace (low bit, latter half)",
        "trace (low bit, first half)",
        *mismatch_table.ENCODINGS.values(),
        "self-replay (codes)",
        "self-replay (low1)",
        "self-replay (low2)",
    ]
    for name, row in rows.items():
        numbers = [row[key] for key in ("logp_abs_mean", "logp_abs_max", "kl_k3_nats", "ess")]
        assert all(math.isfinite(number) for number in numbers)
        assert row["noise"] == (0 if name.startswith("self") else 0.01)
        assert ("code_rate" in row) == (name != "bf16 (BF16 rollout)")
    table = (workdir / "mismatch.md").read_text().split("\n\n")[-1].splitlines()
    assert len(table) == 2 + len(rows) + len(rows) - 3  # under BF16 activations no self-replays
    assert table[0].startswith("| noise | method | bytes a token | codes | codes, latter half |")
    assert table[2].startswith("| BF16 | bf16 (BF16 rollout) | - | - | - | - | - |")
    assert (workdir / "figures/mismatch.png").stat().st_size > 1000


def test_replaying_a_forward_changes_nothing(rows):
    for encoding in ("codes", "low1", "low2"):
        row = rows[f"self-replay ({encoding})"]
        for name in ("code_rate", "scale_rate", "d_act", "route_rate", "out_of_bracket_rate"):
            assert row[name] == 0, name
        assert row["logp_abs_max"] == row["kl_k3_nats"] == 0


def test_guidance_repairs_what_it_covers(rows):
    qat, latter, full = (
        rows[name]
        for name in ("qat", "trace (low bit, latter half)", "trace_full (codes, all layers)")
    )
    assert qat["code_rate"] > 0.01
    assert full["code_rate"] == rows["trace, all layers"]["code_rate"] == 0
    assert 0 < latter["code_rate"] < qat["code_rate"]
    # The guided half starts from an input that has drifted, so some codes leave their bracket.
    assert latter["code_rate_latter_half"] < qat["code_rate_latter_half"] / 2
    assert latter["code_rate_by_layer"][0] == qat["code_rate_by_layer"][0] > 0
    assert full["logp_abs_mean"] < qat["logp_abs_mean"] / 20
    assert rows["fp4_rollout"]["code_rate"] > qat["code_rate"]
    assert len(qat["code_rate_by_layer"]) == 2
    assert set(qat["code_rate_by_site"]) == {
        "attention/in", "attention/k", "attention/v", "attention/out", "experts/in",
    }  # fmt: skip


def test_evaluation_of_a_checkpoint(workdir, tmp_path, capsys):
    shutil.copytree(workdir / "checkpoints", tmp_path / "checkpoints")
    evaluate.main(tiny_run.config({"engine_noise": 0.0}), tmp_path)
    results = json.loads((tmp_path / "evaluation.json").read_text())
    answers = results.pop("answers")
    lines = capsys.readouterr().out.splitlines()
    printed = dict(line.split() for line in lines[: len(results)])
    assert {name: float(value) for name, value in printed.items()} == results
    assert [line.split(" | ")[1:] for line in lines[len(results) :]] == [
        [repr(fp4), repr(bf16)] for fp4, bf16 in zip(*answers.values(), strict=True)
    ]
    (row,) = read_metrics(workdir)
    assert results["step"] == 0
    for name in ("eval/accuracy_fp4", "eval/accuracy_bf16"):
        assert results[name] == row[name]
    # Without noise the guided training forward is the decode: it would have chosen every token.
    assert results["guided/same_choice"] == 1
    assert results["guided/logp_abs_mean"] <= results["guided/logp_abs_max"] < 1e-4


@pytest.mark.parametrize("method", ["bf16", "trace"])
def test_what_was_trained_in_bf16_is_quantized_afterwards_in_4_6(method, tmp_path):
    """Post-hoc quantization: the run knew nothing of the format, nor of the method."""
    tiny_run.go(tmp_path, {"steps": 2, "method": "bf16"})
    (trained,) = read_metrics(tmp_path)[-1:]
    overrides = {"method": method, "engine_noise": 0.0, "quantize": (("*", "nvfp4_4over6"),)}
    evaluate.main(tiny_run.config(overrides), tmp_path)
    results = json.loads((tmp_path / "evaluation.json").read_text())
    assert results["step"] == 2
    assert results["eval/accuracy_bf16"] == trained["eval/accuracy_bf16"]
    assert 0 <= results["eval/accuracy_fp4"] <= 1
    assert results["guided/same_choice"] == 1


def test_nothing_to_evaluate(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*; train one with experiments"):
        evaluate.main(tiny_run.config(), tmp_path)


def test_an_import_is_evaluated_as_it_is(tmp_path, capsys):
    config = tiny_run.config({"engine_noise": 0.0})
    cfg = settings.resolve(config).cfg
    params = decoder.init(cfg, jax.random.key(0))
    checkpoint_hf.import_params(params, cfg, tmp_path / "imported")
    with config.unlocked():
        del config["model"]
        config["model"] = f"{tmp_path / 'imported'}"
    evaluate.main(config, tmp_path / "run")
    results = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert results["step"] == 0
    assert results["guided/same_choice"] == 1
    assert len(results["answers"]["fp4"]) == 8
