"""A sweep as a list of runs: what each overrides, where it lies, how far it has come.

A run is a run directory of rl/run.py, named by its overrides, and says itself whether it is done:

    <sweep>/method=trace,seed=0/summary.json   done
                               /failed.json    the last attempt ended with an error
                               /log.txt        what it printed

so that a sweep that was killed, or that grew, only does what is missing.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from trace_jax.analysis import run_directory
from trace_jax.rl import settings

KEYS = ("config", "fixed", "axes", "launcher", "jobs", "gpus_per_run", "slurm")
SEED, FILE = "seed", "config"  # the axis of repetitions, and the one that varies the file
LONGEST_NAME = 120  # characters; file systems allow 255


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    config: str  # FILE.py[:arg]
    fixed: Mapping[str, Any]  # overrides by dotted key, the same in all runs of the sweep
    varied: Mapping[str, Any]  # overrides that tell it from the others
    root: Path  # the sweep's directory

    @functools.cached_property
    def name(self) -> str:
        """Its stable name: what it varies, and a hash where a file system would not take that."""
        text = ",".join(f"{key}={value}" for key, value in self.varied.items()) or "run"
        name = re.sub(r"[^\w.=,+-]", "-", text)
        if name == text and len(name) <= LONGEST_NAME:
            return name
        return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def overrides(self) -> dict[str, Any]:
        """All that it overrides in its config file, by dotted key."""
        return {k: v for k, v in {**self.fixed, **self.varied}.items() if k != FILE}

    @property
    def group(self) -> str:
        """Its name but for the seed: runs of one group are repetitions of each other."""
        rest = {key: value for key, value in self.varied.items() if key != SEED}
        return dataclasses.replace(self, varied=rest).name

    @property
    def workdir(self) -> Path:
        """Its run directory."""
        return self.root / self.name

    @property
    def state(self) -> str:
        """done, failed (the last attempt did) or missing."""
        if (self.workdir / "summary.json").exists():
            return "done"
        return "failed" if (self.workdir / "failed.json").exists() else "missing"

    @property
    def error(self) -> str:
        """The last line that a failed attempt printed."""
        return json.loads((self.workdir / "failed.json").read_text())["error"]

    def resolved(self) -> ConfigDict:
        """Its configuration. Raises ValueError naming an override that does not fit the config."""
        config = load_config(self.config)
        for key, value in self.overrides.items():
            try:
                config.update_from_flattened_dict({key: value})
            except (KeyError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"run {self.name}: {key}={value!r} does not fit {self.config}: "
                    + str(error).split(" Other fields present")[0]
                ) from error
        return config

    def command(self) -> list[str]:
        """The command line that makes or continues it."""
        return [
            sys.executable, "-m", "experiments.rl", f"--config={self.config}",
            f"--workdir={self.workdir}",
            *(f"--config.{key}={value}" for key, value in self.overrides.items()),
        ]  # fmt: skip

    def check(self) -> None:
        """Raises ValueError for a configuration that is wrong, or is not the one of a done run."""
        config = self.resolved()
        try:
            settings.resolve(config)
        except ValueError as error:
            raise ValueError(f"run {self.name}: {error}") from error
        if self.state == "done":
            there = run_directory.read_config(self.workdir)
            changed = run_directory.differences(there, config.to_dict())
            if changed:
                raise ValueError(
                    f"{self.workdir} was made with another configuration:\n"
                    + "".join(f"  {line}\n" for line in changed)
                    + "name another --workdir for this sweep, or move that run away"
                )

    def execute(self, environment: Mapping[str, str]) -> bool:
        """Makes or continues the run in a process of its own; whether it is done.

        Waits for another process that is at the same run, as one whose sweep was killed may be.
        """
        self.workdir.mkdir(parents=True, exist_ok=True)
        with locked(self.workdir / "lock") as lock:
            if self.state == "done":
                return True
            failed = self.workdir / "failed.json"
            failed.unlink(missing_ok=True)
            log = self.workdir / "log.txt"
            with log.open("ab") as output:
                code = subprocess.run(
                    self.command(), stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                    env=dict(environment), pass_fds=[lock], check=False,
                ).returncode  # fmt: skip
            if code:
                failed.write_text(json.dumps({"code": code, "error": last_line(log)}) + "\n")
            return code == 0


def runs_of(config: Mapping, root: str | Path) -> list[Run]:
    """The runs of a sweep's configuration: the product of its axes, every seed last.

    So all methods have run once before any has run twice. An axis named "config" varies the file.
    Raises ValueError naming a key that is missing, unknown or empty.
    """
    given = set(config.keys())
    if given != set(KEYS):
        raise ValueError(
            f"sweep: missing {sorted(set(KEYS) - given)}, unknown {sorted(given - set(KEYS))}; "
            f"its fields are {list(KEYS)}"
        )
    fixed, axes = (run_directory.flatten(plain(config[key])) for key in ("fixed", "axes"))
    for key, values in axes.items():
        if not isinstance(values, list | tuple) or not values:
            raise ValueError(f"config.axes.{key}={values!r}: must be a tuple of one value or more")
        if key in fixed:
            raise ValueError(f"config.fixed.{key}={fixed[key]!r}: {key} is an axis too; drop one")
    order = sorted(axes, key=lambda key: key != SEED)
    runs = []
    for values in itertools.product(*(axes[key] for key in order)):
        chosen = dict(zip(order, values, strict=True))
        file = chosen.get(FILE, config["config"])
        varied = {key: chosen[key] for key in axes}
        runs.append(Run(file, fixed, varied, Path(root)))
    twice = {run.name for run in runs if [r.name for r in runs].count(run.name) > 1}
    if twice:
        raise ValueError(f"config.axes names {sorted(twice)} twice; drop a repeated value")
    return runs


def load_config(file: str) -> ConfigDict:
    """get_config() of FILE.py, or get_config(arg) of FILE.py:arg.

    Raises ValueError for a file that is not there or has no get_config.
    """
    path, _, argument = file.partition(":")
    if not Path(path).is_file():
        raise ValueError(f"config={file!r}: no such file; give FILE.py or FILE.py:argument")
    spec = importlib.util.spec_from_file_location("_config_of_a_run", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"config={file!r}: has no get_config()")
    return module.get_config(argument) if argument else module.get_config()


def plain(config: Mapping) -> dict:
    """A ConfigDict, or a dict, as nested dicts."""
    return config.to_dict() if isinstance(config, ConfigDict) else dict(config)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty; progress bars count as lines."""
    lines = re.split(r"[\r\n]+", log.read_text(errors="replace"))
    return next((line for line in reversed(lines) if line.strip()), "")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Holds the file's lock; the descriptor, which a child process may hold on to."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
