"""The rollout queue: order, staleness limits, and that nothing is ever lost."""

from dataclasses import dataclass

import pytest

from trace_jax.rl.queue import RolloutQueue


@dataclass(frozen=True)
class FakeRollout:
    version: int
    name: str = ""


def test_first_in_first_out():
    queue = RolloutQueue(max_staleness=3)
    for name in "abc":
        queue.put(FakeRollout(5, name))
    assert len(queue) == 3
    assert [queue.take(5).name for _ in range(3)] == ["a", "b", "c"]
    assert len(queue) == 0


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_staleness_up_to_the_limit_is_served(max_staleness):
    queue = RolloutQueue(max_staleness)
    queue.put(FakeRollout(7))
    assert queue.take(7 + max_staleness).version == 7


def test_a_stale_rollout_raises_and_stays():
    queue = RolloutQueue(max_staleness=3)
    queue.put(FakeRollout(2))
    message = r"rl\.max_staleness is 3.*version 2 .*at 6 \(4 ahead\); set rl\.max_staleness to 4"
    with pytest.raises(ValueError, match=message):
        queue.take(6)
    assert queue.to_list() == [FakeRollout(2)]
    assert queue.take(5) == FakeRollout(2)


def test_a_rollout_from_the_future_raises_and_stays():
    queue = RolloutQueue(max_staleness=3)
    queue.put(FakeRollout(9))
    with pytest.raises(ValueError, match="version 9, but the trainer is at 8; restore queue and"):
        queue.take(8)
    assert len(queue) == 1


def test_an_empty_queue_raises():
    with pytest.raises(IndexError, match="rollout queue is empty; put"):
        RolloutQueue(max_staleness=0).take(0)


def test_a_negative_limit_raises():
    with pytest.raises(ValueError, match=r"rl\.max_staleness is -1; set it to 0"):
        RolloutQueue(max_staleness=-1)


def test_the_list_round_trip_keeps_order_and_leaves_the_queue_alone():
    queue = RolloutQueue(max_staleness=2)
    for version in (4, 4, 5):
        queue.put(FakeRollout(version))
    held = queue.to_list()
    held.append(FakeRollout(6))
    assert len(queue) == 3

    restored = RolloutQueue.from_list(queue.to_list(), max_staleness=2)
    assert restored.max_staleness == 2
    assert restored.to_list() == queue.to_list()
    assert [restored.take(6).version for _ in range(3)] == [4, 4, 5]
    assert len(queue) == 3
