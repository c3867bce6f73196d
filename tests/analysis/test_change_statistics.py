"""What is said about changes of log-probs, on changes made by hand."""

import numpy as np
import pytest

from trace_jax.analysis import change_statistics as stats


def test_outside_counts_ratios_beyond_either_side_of_the_clip_range():
    ratio_N = np.array([0.79, 0.81, 1.0, 1.27, 1.29])
    assert stats.outside(np.log(ratio_N), 0.2, 0.28) == 2 / 5
    assert stats.outside(np.zeros(3), 0.2, 0.28) == 0


def test_slope_and_correlation_of_a_line():
    truth_N = np.array([-1.0, 0.0, 1.0, 2.0])
    assert stats.slope(0.25 * truth_N + 3, truth_N) == pytest.approx(0.25)
    assert stats.correlation(0.25 * truth_N + 3, truth_N) == pytest.approx(1)
    assert stats.correlation(-truth_N, truth_N) == pytest.approx(-1)


def test_slope_and_correlation_with_noise_beside_the_line():
    truth_N, noise_N = np.array([1.0, 1.0, -1.0, -1.0]), np.array([1.0, -1.0, 1.0, -1.0])
    assert stats.slope(truth_N + noise_N, truth_N) == pytest.approx(1)
    assert stats.correlation(truth_N + noise_N, truth_N) == pytest.approx(0.5**0.5)
    assert stats.slope(truth_N, truth_N + noise_N) == pytest.approx(0.5)  # flattened


def test_what_never_changes_has_neither():
    still_N, moving_N = np.zeros(4), np.arange(4.0)
    assert stats.slope(moving_N, still_N) is None
    assert stats.correlation(moving_N, still_N) is None
    assert stats.correlation(still_N, moving_N) is None
    assert stats.slope_on_mean(moving_N, still_N, still_N) is None
    assert stats.correlation_with_mean(moving_N, still_N, still_N) is None


def test_nothing_is_said_of_a_mean_on_which_its_halves_disagree():
    truth_N = np.tile([0.1, -0.1], 4)
    first_N, second_N = (np.tile(np.repeat([1.0, -1.0], n), 8 // (2 * n)) for n in (2, 4))
    halves = truth_N + first_N, truth_N + second_N  # they correlate by 0.01
    assert stats.slope_on_mean(truth_N, *halves) is None
    assert stats.correlation_with_mean(truth_N, *halves) is None


def test_noise_of_a_reading_does_not_flatten_the_slope_on_the_mean():
    truth_N = np.tile([1.0, -1.0], 8)
    first, second, own = (np.tile(np.repeat([1.0, -1.0], n), 16 // (2 * n)) for n in (2, 4, 8))
    halves = truth_N + first, truth_N + second
    assert stats.slope_on_mean(truth_N / 4, *halves) == pytest.approx(0.25)
    assert stats.slope(truth_N / 4, halves[0]) == pytest.approx(0.125)
    assert stats.correlation_with_mean(truth_N / 4, *halves) == pytest.approx(1)
    # Half of this variance is the truth's.
    assert stats.correlation_with_mean(truth_N + own, *halves) ** 2 == pytest.approx(0.5)
