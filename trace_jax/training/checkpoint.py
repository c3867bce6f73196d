"""Orbax checkpoints: train state, random key and rollout queue, so that a resumed run is the run.

The data position is the step (prompts are a pure function of seed and step): not stored apart.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from trace_jax.training.state import TrainState


class Checkpoints:
    """Checkpoints of a run, one a saved step, the newest `keep` of them."""

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        """Opens (and makes) the directory."""
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(
            Path(directory).absolute(),
            options=options,
            item_handlers=dict(
                saved=ocp.StandardCheckpointHandler(),
                queue=ocp.StandardCheckpointHandler(),
                length=ocp.JsonCheckpointHandler(),
            ),
        )

    def latest(self) -> int | None:
        """The newest saved step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, key: jax.Array, queue: list[Any]) -> None:
        """Writes one checkpoint, replacing one of the same step."""
        if step in self._manager.all_steps():
            self._manager.delete(step)
        saved = {"state": state, "key": jax.random.key_data(key)}
        items = dict(saved=ocp.args.StandardSave(saved), length=ocp.args.JsonSave(len(queue)))
        if queue:
            queued = {f"{i}": rollout for i, rollout in enumerate(queue)}
            items["queue"] = ocp.args.StandardSave(queued)
        self._manager.save(step, args=ocp.args.Composite(**items))
        self._manager.wait_until_finished()

    def restore_state(self, step: int, state: TrainState) -> tuple[TrainState, jax.Array]:
        """(state, random key) of a saved step; `state` gives structure, shapes and shardings.

        Raises ValueError, naming the first leaf that differs, for a checkpoint of another shape.
        """
        like = {"state": state, "key": jax.random.key_data(jax.random.key(0))}
        self._check_shapes(step, like)
        restore = ocp.args.StandardRestore(jax.tree.map(_abstract, like))
        saved = self._manager.restore(step, args=ocp.args.Composite(saved=restore))["saved"]
        return saved["state"], jax.random.wrap_key_data(saved["key"])

    def restore_queue(self, step: int, rollout: Any) -> list[Any]:
        """The rollouts that were queued at a saved step, each of the shapes of `rollout`."""
        args = ocp.args.Composite(length=ocp.args.JsonRestore())
        length = self._manager.restore(step, args=args)["length"]
        if not length:
            return []
        like = {f"{i}": jax.tree.map(_abstract, rollout) for i in range(length)}
        args = ocp.args.Composite(queue=ocp.args.StandardRestore(like))
        queue = self._manager.restore(step, args=args)["queue"]
        return [queue[f"{i}"] for i in range(length)]

    def close(self) -> None:
        """Waits for writes and closes."""
        self._manager.close()

    def _check_shapes(self, step: int, like: dict) -> None:
        found = self._manager.item_metadata(step)["saved"]
        found, wanted = (_shapes(getattr(tree, "tree", tree)) for tree in (found, like))
        names = found.keys() | wanted.keys()
        for name in sorted(names, key=lambda name: ("opt_state" in name, name)):
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"checkpoint step {step}: {name} is {found.get(name, 'missing')} there, but "
                    f"the model wants {wanted.get(name, 'no such leaf')}; "
                    "use the configuration it was made with, or another --workdir"
                )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each leaf by its path."""
    part = lambda k: str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(map(part, path)): tuple(leaf.shape) for path, leaf in leaves}


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
