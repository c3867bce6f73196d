"""What is said about changes of log-probs, on changes made by hand."""

import numpy as np
import pytest

from trace_jax.analysis import policy_change, policy_change_report


def test_outside_counts_ratios_beyond_either_side_of_the_clip_range():
    ratio_N = np.array([0.79, 0.81, 1.0, 1.27, 1.29])
    assert policy_change.outside(np.log(ratio_N), 0.2, 0.28) == 2 / 5
    assert policy_change.outside(np.zeros(3), 0.2, 0.28) == 0


def test_slope_and_correlation_of_a_line():
    truth_N = np.array([-1.0, 0.0, 1.0, 2.0])
    assert policy_change.slope(0.25 * truth_N + 3, truth_N) == pytest.approx(0.25)
    assert policy_change.correlation(0.25 * truth_N + 3, truth_N) == pytest.approx(1)
    assert policy_change.correlation(-truth_N, truth_N) == pytest.approx(-1)


def test_slope_and_correlation_with_noise_beside_the_line():
    truth_N, noise_N = np.array([1.0, 1.0, -1.0, -1.0]), np.array([1.0, -1.0, 1.0, -1.0])
    assert policy_change.slope(truth_N + noise_N, truth_N) == pytest.approx(1)
    assert policy_change.correlation(truth_N + noise_N, truth_N) == pytest.approx(0.5**0.5)
    assert policy_change.slope(truth_N, truth_N + noise_N) == pytest.approx(0.5)  # flattened


def test_what_never_changes_has_neither():
    still_N, moving_N = np.zeros(4), np.arange(4.0)
    assert policy_change.slope(moving_N, still_N) is None
    assert policy_change.correlation(moving_N, still_N) is None
    assert policy_change.correlation(still_N, moving_N) is None
    assert policy_change.slope_on_mean(moving_N, still_N, still_N) is None
    assert policy_change.correlation_with_mean(moving_N, still_N, still_N) is None


def test_nothing_is_said_of_a_mean_on_which_its_halves_disagree():
    truth_N = np.tile([0.1, -0.1], 4)
    first_N, second_N = (np.tile(np.repeat([1.0, -1.0], n), 8 // (2 * n)) for n in (2, 4))
    halves = truth_N + first_N, truth_N + second_N  # they correlate by 0.01
    assert policy_change.slope_on_mean(truth_N, *halves) is None
    assert policy_change.correlation_with_mean(truth_N, *halves) is None


def test_noise_of_a_reading_does_not_flatten_the_slope_on_the_mean():
    truth_N = np.tile([1.0, -1.0], 8)
    first, second, own = (np.tile(np.repeat([1.0, -1.0], n), 16 // (2 * n)) for n in (2, 4, 8))
    halves = truth_N + first, truth_N + second
    assert policy_change.slope_on_mean(truth_N / 4, *halves) == pytest.approx(0.25)
    assert policy_change.slope(truth_N / 4, halves[0]) == pytest.approx(0.125)
    assert policy_change.correlation_with_mean(truth_N / 4, *halves) == pytest.approx(1)
    # Half of this variance is the truth's.
    assert policy_change.correlation_with_mean(truth_N + own, *halves) ** 2 == pytest.approx(0.5)


def test_a_cell_is_the_mean_over_seeds_of_those_that_have_a_value():
    row = dict(moved_by="updates", trained="qat", learning_rate=1e-3, amount=2, view="BF16")
    rows = [row | dict(abs_mean=0.1, slope=None), row | dict(abs_mean=0.3, slope=0.5)]
    move = ("qat", 1e-3, 2)
    assert policy_change_report.moves(rows, "updates") == [move]
    average = lambda field: policy_change_report.average(rows, "updates", move, "BF16", field)
    assert average("abs_mean") == pytest.approx(0.2)
    assert average("slope") == 0.5
    assert policy_change_report.average(rows, "staleness", move, "BF16", "slope") is None
