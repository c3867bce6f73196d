"""Figures are drawn from run directories alone, whatever a run managed to write."""

import numpy as np
import pytest
from matplotlib.image import imread

from trace_jax.analysis import plots
from trace_jax.analysis.run_directory import RunDirectory
from trace_jax.rl.methods import METHODS


def make_run(workdir, steps=30, mismatch=0.01, every=10):
    with RunDirectory(workdir) as run:
        run.write_config({"method": workdir.name})
        for step in range(steps):
            row = {
                "reward/mean": step / 30,
                "mismatch/logp_abs_mean": mismatch * (1 + step),
                "mismatch/logp_abs_max": 20 * mismatch,
            }
            if step % every == 0:
                row |= {"eval/accuracy_fp4": step / 40, "eval/accuracy_bf16": step / 35}
            run.append_metrics(step, row)
    return workdir


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, for a look at their lines."""
    figures = []
    save = plots._save
    monkeypatch.setattr(
        plots, "_save", lambda figure, path: figures.append(figure) or save(figure, path)
    )
    return figures


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def test_plot_run_draws_what_was_measured(tmp_path, drawn):
    path = plots.plot_run(make_run(tmp_path / "trace", steps=80))
    assert path == tmp_path / "trace" / "figures" / "run.png"
    assert imread(path).shape == (520, 1440, 4)
    reward, accuracy, mismatch = drawn[0].axes
    np.testing.assert_array_equal(lines(reward)["each step"].get_ydata(), np.arange(80) / 30)
    assert "mean of 5 steps" in lines(reward)
    np.testing.assert_array_equal(lines(accuracy)["FP4"].get_xdata(), np.arange(0, 80, 10))
    assert set(lines(accuracy)) == {"FP4", "BF16", "after warm-up"}
    assert set(lines(mismatch)) == {"mean", "largest"}
    assert mismatch.get_yscale() == "log"
    assert all(
        axes.get_title() and axes.get_xlabel() and axes.get_ylabel() for axes in drawn[0].axes
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("run", [dict(steps=1), dict(mismatch=0.0), dict(mismatch=float("nan"))])
def test_plot_run_of_a_short_an_exact_and_a_broken_run(tmp_path, run):
    assert plots.plot_run(make_run(tmp_path / "qat", **run)).exists()


@pytest.mark.filterwarnings("error")
def test_plot_run_with_metrics_missing(tmp_path, drawn):
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {"reward/mean": 0.5})
    plots.plot_run(tmp_path)
    assert [t.get_text() for axes in drawn[0].axes for t in axes.texts] == [
        "no values",
        "no value above 0",
    ]


def test_plot_run_without_rows(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        plots.plot_run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="has no rows"):
        plots.plot_run(tmp_path)


def test_plot_comparison_has_a_line_a_seed_and_a_median(tmp_path, drawn):
    runs = {
        "trace": [make_run(tmp_path / f"trace{seed}", mismatch=seed + 1) for seed in range(3)],
        "qat": [make_run(tmp_path / f"qat{n}", steps=n) for n in (30, 20)],
        "new_method": [make_run(tmp_path / "new")],
    }
    out = plots.plot_comparison(runs, tmp_path / "report" / "methods.png")
    assert out == tmp_path / "report" / "methods.png"
    assert imread(out).shape == (520, 1440, 4)
    for axes in drawn[0].axes:
        assert set(lines(axes)) == set(runs)
        assert len(axes.lines) == 6 + 3
        assert lines(axes)["trace"].get_color() == plots.METHOD_COLORS["trace"]
    mismatch = lines(drawn[0].axes[2])
    np.testing.assert_allclose(mismatch["trace"].get_ydata(), 2.0 * np.arange(1, 31))
    assert mismatch["qat"].get_xdata()[-1] == 19


def test_no_two_methods_look_alike(tmp_path, drawn):
    looks = [plots.look(method) for method in METHODS] + list(plots.OTHER_LOOKS)
    assert len(set(looks)) == len(METHODS) + len(plots.OTHER_LOOKS)
    runs = {method: [make_run(tmp_path / method, steps=2)] for method in (*METHODS, "a", "b")}
    plots.plot_comparison(runs, tmp_path / "methods.png")
    shown = lines(drawn[0].axes[0]).values()
    assert len({(line.get_color(), str(line._dash_pattern)) for line in shown}) == len(runs)


def test_plot_comparison_names_a_method_without_runs(tmp_path):
    with pytest.raises(ValueError, match="method 'qat' has no runs"):
        plots.plot_comparison({"qat": []}, tmp_path / "methods.png")


def test_smooth_is_the_mean_of_what_is_there():
    values = np.array([0.0, 3.0, 6.0, 0.0, 3.0])
    np.testing.assert_allclose(plots.smooth(values, 3), [1.5, 3.0, 3.0, 3.0, 1.5])
    np.testing.assert_array_equal(plots.smooth(values, 1), values)
    assert plots.smooth(values[:0], 1).shape == (0,)


def test_median_over_the_steps_that_all_seeds_have():
    curves = [
        (np.array([0, 1, 2]), np.array([1.0, 2.0, 3.0])),
        (np.array([0, 2]), np.array([3.0, 9.0])),
        (np.array([2, 0]), np.array([4.0, 8.0])),
    ]
    steps, values = plots.median(curves)
    np.testing.assert_array_equal(steps, [0, 2])
    np.testing.assert_array_equal(values, [3.0, 4.0])


def test_curve_leaves_out_rows_without_the_metric():
    rows = [{"step": 0}, {"step": 1, "a": 2.0}, {"step": 2, "a": None}]
    steps, values = plots.curve(rows, "a")
    assert (steps.tolist(), values.tolist()) == ([1], [2.0])
