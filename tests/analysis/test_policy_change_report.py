"""The tables of policy changes, on rows made by hand."""

import pytest

from trace_jax.analysis import policy_change_report


def test_a_cell_is_the_mean_over_seeds_of_those_that_have_a_value():
    row = dict(moved_by="updates", trained="qat", learning_rate=1e-3, amount=2, view="BF16")
    rows = [row | dict(abs_mean=0.1, slope=None), row | dict(abs_mean=0.3, slope=0.5)]
    move = ("qat", 1e-3, 2)
    assert policy_change_report.moves(rows, "updates") == [move]
    average = lambda field: policy_change_report.average(rows, "updates", move, "BF16", field)
    assert average("abs_mean") == pytest.approx(0.2)
    assert average("slope") == 0.5
    assert policy_change_report.average(rows, "staleness", move, "BF16", "slope") is None
