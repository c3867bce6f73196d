"""Restoration of single rows: what is promised of the encodings, at the widths of real models."""

import pytest

from trace_jax.analysis import restoration


@pytest.fixture(autouse=True)
def fewer_values(monkeypatch):
    monkeypatch.setattr(restoration, "VALUES", 2**17)


def test_one_bit_a_value_restores_everything_up_to_three_percent():
    found = restoration.restored("low1", 256, 0.03)
    assert found.nearest > 0.05
    assert found.guided == 0
    assert found.bits == 1.5 + 32 / 256  # the outer scale of a row


@pytest.mark.parametrize(
    ("width", "noise", "left"), [(2048, 0.01, 0), (256, 0.005, 0), (256, 0.01, 0.02)]
)
def test_a_quarter_of_a_bit_restores_long_rows(width, noise, left):
    found = restoration.restored("syndrome", width, noise)
    assert found.nearest > 0.01
    assert found.guided <= left * found.nearest
    assert found.bits == 0.25 + 32 / width


def test_rows_that_cannot_be_explained_round_to_nearest():
    found = restoration.restored("syndrome", 256, 0.03)
    assert 0.3 * found.nearest < found.guided < 0.8 * found.nearest
    found = restoration.restored("syndrome", 256, 0.1)  # even scales are two codes off by now
    assert found.guided == pytest.approx(found.nearest, rel=0.02)
