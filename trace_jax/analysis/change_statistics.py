"""How one change of log-probs answers to another; all changes [N], one a token, in nats.

A truth that can only be read with noise is read twice: noise that two readings do not share drops
out of their covariance.
"""

import math

import numpy as np

LEAST_SHARED = 0.3  # of the readings' variance; below that nothing is said of what they share


def outside(change_N: np.ndarray, clip_low: float, clip_high: float) -> float:
    """Share of tokens whose ratio e^change lies outside [1 - clip_low, 1 + clip_high]."""
    ratio_N = np.exp(change_N)
    return float(np.mean((ratio_N < 1 - clip_low) | (ratio_N > 1 + clip_high)))


def slope(change_N: np.ndarray, truth_N: np.ndarray) -> float | None:
    """What a change answers to one nat of truth: least squares; None for a constant truth."""
    variance = _covariance(truth_N, truth_N)
    return _covariance(change_N, truth_N) / variance if variance > 0 else None


def correlation(change_N: np.ndarray, truth_N: np.ndarray) -> float | None:
    """Pearson's; None where either is constant."""
    scale = math.sqrt(_covariance(change_N, change_N) * _covariance(truth_N, truth_N))
    return _covariance(change_N, truth_N) / scale if scale > 0 else None


def slope_on_mean(change_N: np.ndarray, first_N: np.ndarray, second_N: np.ndarray) -> float | None:
    """`slope` against what two noisy readings of one truth share; None where they share too little.

    cov(change, (first + second) / 2) / cov(first, second): noise of a reading, which would flatten
    an ordinary slope, is in neither covariance.
    """
    shared = _shared(first_N, second_N)
    return shared and _covariance(change_N, (first_N + second_N) / 2) / shared


def correlation_with_mean(
    change_N: np.ndarray, first_N: np.ndarray, second_N: np.ndarray
) -> float | None:
    """`correlation` with what two noisy readings share; an estimate, it may pass 1.

    Its square is the share of a change's variance that is the truth's.
    """
    shared, variance = _shared(first_N, second_N), _covariance(change_N, change_N)
    if not (shared and variance):
        return None
    return _covariance(change_N, (first_N + second_N) / 2) / math.sqrt(shared * variance)


def _shared(first_N: np.ndarray, second_N: np.ndarray) -> float | None:
    """The readings' covariance, if it is LEAST_SHARED of their mean variance or more, else None."""
    shared = _covariance(first_N, second_N)
    variance = (_covariance(first_N, first_N) + _covariance(second_N, second_N)) / 2
    return shared if shared > 0 and shared >= LEAST_SHARED * variance else None


def _covariance(x_N: np.ndarray, y_N: np.ndarray) -> float:
    x_N, y_N = np.asarray(x_N, float), np.asarray(y_N, float)
    return float(np.mean((x_N - x_N.mean()) * (y_N - y_N.mean())))
