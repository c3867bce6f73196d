"""A run that takes seconds: configs/tiny_cpu.py at toy sizes, on one device, quickly compiled."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from configs import tiny_cpu
from trace_jax.analysis.run_directory import read_metrics
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import run

SMALL = {  # after this warm-up about half of the sampled answers are right
    "steps": 4,
    "warmup_steps": 40,
    "warmup.batch": 32,
    "warmup.learning_rate": 1e-2,
    "rl.learning_rate": 3e-4,
    "model.initializer_range": 0.1,
    "model.hidden_size": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.moe_intermediate_size": 32,
    "task.digits": 2,
    "task.train_size": 64,
    "task.test_size": 8,
    "rollout.prompts": 4,
    "rollout.completions": 4,
    "rollout.prompt_length": 3,
    "rollout.max_new_tokens": 3,
    "guidance.audit_sequences": 8,
    "evaluation.every": 2,
    "evaluation.prompts": 8,
    "checkpoint_every": 2,
    "samples_every": 2,
}

# Compilation is nearly all that such a run costs: skip optimization, and never compile twice.
QUICK = {
    "jax_disable_most_optimizations": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
}


def config(overrides: dict | None = None) -> ConfigDict:
    """configs/tiny_cpu.py at toy sizes; overrides by dotted key."""
    made = tiny_cpu.get_config()
    made.update_from_flattened_dict(SMALL | (overrides or {}))
    return made


def go(workdir: Path, overrides: dict | None = None) -> list[dict]:
    """The rows of metrics of a run, made or continued here."""
    run.run(config(overrides), workdir, progress=False)
    return read_metrics(workdir)


def untimed(rows: list[dict]) -> list[dict]:
    """Rows without what a clock measured: the part that two equal runs share to the last bit."""
    clocked = lambda name: name.startswith("time/") or name == "rollout/tokens_per_s"
    return [{k: v for k, v in row.items() if not clocked(k)} for row in rows]


def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled programs that all test processes of this session share."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return shared / "compiled_programs"


@contextlib.contextmanager
def quick_compiles(programs: Path) -> Iterator[None]:
    """Inside, JAX compiles as QUICK says and keeps its programs in a folder."""
    wanted = QUICK | {"jax_compilation_cache_dir": str(programs)}
    before = {name: jax.config.values[name] for name in wanted}
    _configure(wanted)
    try:
        yield
    finally:
        _configure(before)


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Inside, a mesh of one device fits this process of eight."""
    with pytest.MonkeyPatch.context() as patch:
        one = functools.partial(meshes.make_mesh, devices=jax.devices()[:1])
        patch.setattr(meshes, "make_mesh", one)
        yield


def _configure(values: dict) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
