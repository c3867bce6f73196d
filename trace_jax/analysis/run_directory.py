"""The run directory: config, metrics, sampled text and summary on disk, written to survive a kill.

    config.json             the resolved configuration; compared on resume
    metrics.jsonl           one object a step, {"step": 3, "reward/mean": 0.5, ...}: the source of
                            truth
    rollouts/step_*.jsonl   sampled text with rewards, one object a completion
    summary.json            the run's closing numbers
    figures/  checkpoints/  filled by others
    tensorboard/            a mirror of metrics.jsonl

Every file is strict JSON. JSON has no NaN and no infinity, so these are written as the strings
"NaN", "Infinity" and "-Infinity" and come back as floats from the readers here.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from tensorboardX import SummaryWriter

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RunDirectory:
    """The writing side of a run directory, for one process at a time; usable in a with statement.

    A new run and a resumed one do the same: `write_config`, then `truncate_metrics` with the first
    step to come, then `append_metrics` once a step.
    """

    def __init__(self, workdir: str | Path) -> None:
        """Creates the folders that are missing; touches no file."""
        self.path = Path(workdir)
        self.checkpoints = self.path / "checkpoints"
        self.rollouts = self.path / "rollouts"
        self.figures = self.path / "figures"
        for folder in (self.checkpoints, self.rollouts, self.figures):
            folder.mkdir(parents=True, exist_ok=True)
        self._metrics_path = self.path / "metrics.jsonl"
        self._metrics = None
        self._mirror = None
        self._last_step = None

    def write_config(
        self,
        config: Mapping[str, Any],
        may_differ: tuple[str, ...] = ("steps",),
        resumes: bool = True,
    ) -> None:
        """Writes config.json; on resume first checks `config` against the one that is there.

        Args:
          config: the resolved configuration, nested mappings of plain values.
          may_differ: dotted keys, each with all below it, that a resumed run may change.
          resumes: whether there is something to resume; else a config that is there is replaced.

        Raises:
          ValueError: another key differs; names every such key with both values.
        """
        path = self.path / "config.json"
        if resumes and path.exists():
            changed = differences(read_config(self.path), config, may_differ)
            if changed:
                raise ValueError(
                    f"{path} is of a run with another configuration:\n"
                    + "".join(f"  {line}\n" for line in changed)
                    + "set these back to resume that run, or name another --workdir "
                    + f"(a resumed run may change: {', '.join(may_differ) or 'nothing'})"
                )
        _write_atomically(path, _dumps(config, indent=2) + "\n")

    def truncate_metrics(self, before_step: int) -> int:
        """Drops the rows of metrics.jsonl with step >= `before_step`, and a torn last line.

        Returns the number of lines dropped. A resumed run calls it with the step it continues at,
        so that a step that is computed again has one row.
        """
        self.close()
        if not self._metrics_path.exists():
            return 0
        lines = self._metrics_path.read_text().splitlines(keepends=True)
        rows = read_metrics(self.path)  # one shorter than lines where the last line is torn
        kept = [line for line, row in zip(lines, rows, strict=False) if row["step"] < before_step]
        if len(kept) < len(lines):
            _write_atomically(self._metrics_path, "".join(kept))
        return len(lines) - len(kept)

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends the row of one step to metrics.jsonl and mirrors it to TensorBoard.

        The row is on the disk when this returns: a kill loses at most the row being written.
        Values are numbers or arrays of one number, of any dtype; all bits of a float32 are kept.

        Raises:
          ValueError: `step` is not above the last step written.
        """
        if self._metrics is None:
            self._open_metrics(step)
        if step <= self._last_step:
            raise ValueError(
                f"{self._metrics_path}: got step {step} after step {self._last_step}; "
                f"call truncate_metrics({step}) before computing steps again"
            )
        row = _plain({"step": step, **metrics})
        self._metrics.write(_dumps(row) + "\n")
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        self._last_step = step
        for name, value in _numbers(row).items():
            if name != "step" and isinstance(value, int | float):
                self._mirror.add_scalar(name, value, step)
        self._mirror.flush()

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Writes rollouts/step_{step:06d}.jsonl, one object a completion, and returns its path."""
        path = self.rollouts / f"step_{step:06d}.jsonl"
        _write_atomically(path, "".join(_dumps(row) + "\n" for row in rows))
        return path

    def write_json(self, name: str, value: Any) -> Path:
        """Writes a result, plain values all through, to the file `name` of the run directory."""
        path = self.path / name
        _write_atomically(path, _dumps(value, indent=2) + "\n")
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Writes summary.json, whole or not at all, and returns its path."""
        path = self.path / "summary.json"
        _write_atomically(path, _dumps(summary, indent=2) + "\n")
        return path

    def close(self) -> None:
        """Closes the files; a later `append_metrics` opens them again."""
        if self._metrics is not None:
            self._metrics.close()
            self._mirror.close()
            self._metrics = self._mirror = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_metrics(self, step: int) -> None:
        self.truncate_metrics(sys.maxsize)  # appending to a torn line would spoil two rows
        self._metrics = self._metrics_path.open("a")
        rows = read_metrics(self.path)
        self._last_step = rows[-1]["step"] if rows else -sys.maxsize
        # purge_step hides the steps from here on that an earlier process mirrored.
        self._mirror = SummaryWriter(str(self.path / "tensorboard"), purge_step=step)


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in order of steps, without a torn last line.

    Raises:
      FileNotFoundError: there is no metrics.jsonl.
      ValueError: another line than a torn last one is not a JSON object with a step.
    """
    path = Path(workdir) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_numbers(json.loads(line)))
            rows[-1]["step"]
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}:{number}: not a JSON object with a step: {line[:60]!r}; "
                "remove this line to read the others"
            ) from error
    return rows


def read_config(workdir: str | Path) -> dict[str, Any]:
    """The resolved configuration of a run, as nested dicts."""
    return _numbers(json.loads((Path(workdir) / "config.json").read_text()))


def read_summary(workdir: str | Path) -> dict[str, Any]:
    """The closing numbers of a run, as nested dicts."""
    return _numbers(json.loads((Path(workdir) / "summary.json").read_text()))


def read_rollouts(workdir: str | Path, step: int) -> list[dict[str, Any]]:
    """The sampled completions of one step, a dict each."""
    path = Path(workdir) / "rollouts" / f"step_{step:06d}.jsonl"
    return [_numbers(json.loads(line)) for line in path.read_text().splitlines()]


def _plain(value: Any, key: str = "") -> Any:
    """`value` as JSON can hold it: dicts, lists, strings, numbers; `key` names it in an error."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, key) for v in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        return _plain((array if array.dtype.kind in "biu" else array.astype(float)).tolist(), key)
    raise TypeError(
        f"{key}: {value!r} is a {type(value).__name__}, which JSON cannot hold; "
        "give a number, a string, a list or a dict"
    )


def _numbers(value: Any) -> Any:
    """The inverse of `_plain` for parsed JSON: the strings of NON_FINITE become floats."""
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], may_differ: tuple[str, ...] = ()
) -> list[str]:
    """One line for each dotted key whose values differ as JSON, leaving out `may_differ`."""
    old, new = flatten(_plain(old)), flatten(_plain(new))

    def shown(flat: dict, key: str) -> str:
        return repr(flat[key]) if key in flat else "absent"

    return [
        f"{key}: {shown(old, key)} there, {shown(new, key)} now"
        for key in sorted(old.keys() | new.keys())
        if (key in old, old.get(key)) != (key in new, new.get(key))
        and not any(f"{key}.".startswith(f"{free}.") for free in may_differ)
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _write_atomically(path: Path, text: str) -> None:
    """Replaces `path` in one step: a reader, or a kill, finds the old text or the new."""
    scratch = path.with_name(f".{path.name}.tmp")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
