"""The rollout queue: sampled batches on their way to the trainer, none older than allowed."""

from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, Self, TypeVar


class Versioned(Protocol):
    """Anything that says which policy version sampled it (a `Rollout`)."""

    @property
    def version(self) -> int:
        """The version of the weights that sampled it; 0 before the first update."""
        ...


R = TypeVar("R", bound=Versioned)


class RolloutQueue(Generic[R]):
    """First in, first out; on the host. A rollout leaves it by `take` only, never silently.

    Args:
        max_staleness: config `rl.max_staleness`: by how many versions the policy that trains may be
            ahead of the policy that sampled. 0 is on-policy; the paper allows 3.

    Raises:
        ValueError: if max_staleness is negative.
    """

    def __init__(self, max_staleness: int):
        if max_staleness < 0:
            raise ValueError(
                f"rl.max_staleness is {max_staleness}; set it to 0 (on-policy) or more versions"
            )
        self.max_staleness = max_staleness
        self._rollouts: deque[R] = deque()

    def __len__(self) -> int:
        return len(self._rollouts)

    def put(self, rollout: R) -> None:
        """Appends a rollout; its `.version` is the version of the weights that sampled it."""
        self._rollouts.append(rollout)

    def take(self, version_now: int) -> R:
        """The oldest rollout, removed from the queue, for a trainer at version `version_now`.

        Raises:
            IndexError: if the queue is empty.
            ValueError: if the rollout is more than `max_staleness` versions old, or newer than the
                trainer. It then stays in the queue.
        """
        if not self._rollouts:
            raise IndexError("the rollout queue is empty; put a rollout before taking one")
        version = self._rollouts[0].version
        staleness = version_now - version
        if staleness > self.max_staleness:
            raise ValueError(
                f"rl.max_staleness is {self.max_staleness}, but the oldest rollout was sampled at "
                f"policy version {version} and the trainer is at {version_now} ({staleness} "
                f"ahead); set rl.max_staleness to {staleness} or more, or queue fewer rollouts"
            )
        if staleness < 0:
            raise ValueError(
                f"the oldest rollout was sampled at policy version {version}, but the trainer is "
                f"at {version_now}; restore queue and parameters from the same checkpoint"
            )
        return self._rollouts.popleft()

    def to_list(self) -> list[R]:
        """The queued rollouts, oldest first, for a checkpoint; the queue keeps them."""
        return list(self._rollouts)

    @classmethod
    def from_list(cls, rollouts: Iterable[R], max_staleness: int) -> Self:
        """The queue that holds `rollouts`, oldest first: the inverse of `to_list`."""
        queue = cls(max_staleness)
        for rollout in rollouts:
            queue.put(rollout)
        return queue
