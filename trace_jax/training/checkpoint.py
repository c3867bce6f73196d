"""Orbax checkpoints: train state, random key and the rollout queue, so that a resumed run is the run.

The data position is the step (prompts are a pure function of seed and step), hence not stored apart.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from trace_jax.training.state import TrainState


class Checkpoints:
    """Checkpoints of a run, one a saved step, the newest `keep` of them."""

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        """Opens (and makes) the directory."""
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)

    def latest(self) -> int | None:
        """The newest saved step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, key: jax.Array, queue: list[Any]) -> None:
        """Writes one checkpoint, replacing one of the same step."""
        if step in self._manager.all_steps():
            self._manager.delete(step)
        saved = {"state": state, "key": jax.random.key_data(key)}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                saved=ocp.args.StandardSave(saved),
                queue=ocp.args.StandardSave({f"{i}": r for i, r in enumerate(queue)} or {"none": 0}),
                length=ocp.args.JsonSave(len(queue)),
            ),
        )
        self._manager.wait_until_finished()

    def restore(
        self, step: int, state: TrainState, rollout: Any
    ) -> tuple[TrainState, jax.Array, list[Any]]:
        """(state, key, queued rollouts) of a step; `state` and `rollout` give shapes and shardings.

        Raises ValueError, naming the first leaf that differs, for a checkpoint of another shape.
        """
        length = self._manager.restore(step, args=ocp.args.Composite(length=ocp.args.JsonRestore()))
        length = length["length"]
        like = {"state": state, "key": jax.random.key_data(jax.random.key(0))}
        self._check_shapes(step, like)
        queue_like = {f"{i}": rollout for i in range(length)} or {"none": 0}
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                saved=ocp.args.StandardRestore(jax.tree.map(_abstract, like)),
                queue=ocp.args.StandardRestore(jax.tree.map(_abstract, queue_like)),
            ),
        )
        queue = [restored["queue"][f"{i}"] for i in range(length)]
        saved = restored["saved"]
        return saved["state"], jax.random.wrap_key_data(saved["key"]), queue

    def close(self) -> None:
        """Waits for writes and closes."""
        self._manager.close()

    def _check_shapes(self, step: int, like: dict) -> None:
        found = self._manager.item_metadata(step)["saved"]
        found = {_name(path): tuple(leaf.shape) for path, leaf in _leaves(found.tree if hasattr(found, "tree") else found)}
        wanted = {_name(path): tuple(np.shape(leaf)) for path, leaf in _leaves(like)}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"checkpoint step {step}: {name} is {found.get(name, 'missing')}, the model wants "
                    f"{wanted.get(name, 'nothing there')}; use the configuration it was made with"
                )


def _leaves(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _name(path) -> str:
    parts = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path]
    return "/".join(str(part) for part in parts)


def _abstract(leaf):
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype if sharding is None else leaf.dtype, sharding=sharding)
