"""The gap metrics on constructed inputs, where each has a known value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl.gap import LOG_RATIO_LIMIT, gap_metrics, importance_ratio, kl_k3

gap = jax.jit(gap_metrics)


def _metrics(train_BT, rollout_BT, mask_BT):
    metrics = gap(*(jnp.array(x, jnp.float32) for x in (train_BT, rollout_BT, mask_BT)))
    assert all(x.dtype == jnp.float32 and x.shape == () for x in metrics.values())
    return {name.removeprefix("mismatch/"): float(x) for name, x in metrics.items()}


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (64, 129)])
def test_equal_inputs_give_exactly_zero_and_one(shape):
    logp_BT = -np.random.default_rng(0).exponential(2.0, shape)
    mask_BT = np.ones(shape)
    mask_BT[:, 1:] = np.random.default_rng(1).random((shape[0], shape[1] - 1)) < 0.6
    assert _metrics(logp_BT, logp_BT, mask_BT) == {
        "logp_abs_mean": 0.0,
        "logp_abs_max": 0.0,
        "logp_abs_p999": 0.0,
        "kl_k3_nats": 0.0,
        "ess": 1.0,
    }


def test_two_tokens_by_hand():
    # r = ln 2 and -ln 2: rho = 2 and 1/2, mean 5/4, so w = 8/5 and 2/5.
    metrics = _metrics([[np.log(2.0), 0.0]], [[0.0, np.log(2.0)]], [[1, 1]])
    assert metrics["logp_abs_mean"] == pytest.approx(np.log(2.0), rel=1e-6)
    assert metrics["logp_abs_max"] == pytest.approx(np.log(2.0), rel=1e-6)
    assert metrics["kl_k3_nats"] == pytest.approx((2.0 + 0.5 - 2.0) / 2, rel=1e-6)
    assert metrics["ess"] == pytest.approx(2 / (1.6**2 + 0.4**2), rel=1e-6)


def test_quantile_is_over_masked_tokens_only():
    gap_T = np.arange(1001) / 1000.0
    train_BT = np.concatenate([-gap_T, np.full(500, -50.0)])[None]
    mask_BT = np.concatenate([np.ones(1001), np.zeros(500)])[None]
    metrics = _metrics(train_BT, np.zeros_like(train_BT), mask_BT)
    assert metrics["logp_abs_p999"] == pytest.approx(0.999, rel=1e-6)
    assert metrics["logp_abs_max"] == 1.0
    assert metrics["logp_abs_mean"] == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("junk", [np.nan, -np.inf, np.inf, 1e30])
def test_padding_changes_nothing(junk):
    rng = np.random.default_rng(2)
    rollout_BT = -rng.exponential(1.0, (4, 9))
    train_BT = rollout_BT + rng.normal(0.0, 0.3, (4, 9))
    narrow = _metrics(train_BT, rollout_BT, np.ones((4, 9)))
    widths = ((0, 1), (0, 3))
    wide = _metrics(
        np.pad(train_BT, widths, constant_values=junk),
        np.pad(rollout_BT, widths, constant_values=junk),
        np.pad(np.ones((4, 9)), widths),
    )
    assert wide == pytest.approx(narrow, rel=1e-5)


def test_a_common_shift_leaves_the_effective_share_at_one():
    metrics = _metrics([[-1.0, -2.0, -3.0]], [[-1.5, -2.5, -3.5]], [[1, 1, 1]])
    assert metrics["ess"] == pytest.approx(1.0, rel=1e-6)
    assert metrics["logp_abs_mean"] == 0.5


def test_one_dominating_token_leaves_one_effective_token():
    metrics = _metrics([[0.0, 0.0, 0.0, 0.0]], [[-19.0, 0.0, 0.0, 0.0]], [[1, 1, 1, 1]])
    assert metrics["ess"] == pytest.approx(0.25, rel=1e-5)


def test_k3_is_accurate_and_never_negative_at_any_size():
    r_N = np.concatenate([np.logspace(-7, np.log10(19.0), 400), [0.0999999, 0.1, 0.1000001]])
    r_N = np.concatenate([-r_N, [0.0], r_N]).astype(np.float32)
    r64_N = r_N.astype(np.float64)
    # expm1(r) - r cancels in float64 too, though far later: there, use the series.
    series_N = r64_N**2 / 2 + r64_N**3 / 6 + r64_N**4 / 24
    expected_N = np.where(np.abs(r64_N) < 1e-3, series_N, np.expm1(r64_N) - r64_N)
    np.testing.assert_allclose(kl_k3(jnp.array(r_N)), expected_N, rtol=1e-5)
    assert np.all(kl_k3(jnp.array(r_N)) >= 0)


def test_a_wild_gap_is_reported_whole_while_ratios_stay_finite():
    metrics = _metrics([[0.0, -1.0]], [[-300.0, -1.0]], [[1, 1]])
    assert metrics["logp_abs_max"] == 300.0
    assert all(np.isfinite(x) for x in metrics.values())
    limit = np.exp(LOG_RATIO_LIMIT)
    ratio_N = importance_ratio(jnp.array([1e30, -np.inf]))
    np.testing.assert_allclose(ratio_N, [limit, 1 / limit], rtol=1e-5)


def test_a_nan_on_a_real_token_is_not_hidden():
    metrics = _metrics([[np.nan, -1.0]], [[-1.0, -1.0]], [[1, 1]])
    for name in ("logp_abs_mean", "logp_abs_max", "kl_k3_nats", "ess"):
        assert np.isnan(metrics[name])


def test_a_nan_in_a_large_batch_shows_in_the_maximum():
    # XLA's float maximum drops NaN on CPU in arrays of about this size.
    logp = np.full((64, 512), -1.0, np.float32)
    logp[17, 300] = np.nan
    metrics = gap_metrics(logp, np.full_like(logp, -1.5), np.ones_like(logp))
    assert np.isnan(metrics["mismatch/logp_abs_max"])
