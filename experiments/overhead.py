"""What recording costs a rollout and guidance a training step, in time and in bytes.

    python -m experiments.overhead --config=configs/tiny_cpu.py --workdir=runs/overhead

One process, pairs of runs (--repeats of them), random weights and prompts. The base of the rollouts
records nothing at all; the base of the training steps is `qat`, the same step without guidance. No
sequence stops early and no weight moves, so every repetition does the same work; emulated noise is
off, and so are audits but where named. Targets: recording at most 6%, guided training at most 8%.
The default takes about 3 minutes on 2 cores.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags

from experiments import command_line
from trace_jax.analysis import overhead
from trace_jax.models import decoder, packing
from trace_jax.parallel import mesh as meshes
from trace_jax.rl.settings import Settings, resolve
from trace_jax.rollout.sampler import Rollout
from trace_jax.training import state as train_state
from trace_jax.training.step import TrainBatch

REPEATS = flags.DEFINE_integer("repeats", 9, "pairs of runs, at least 5", lower_bound=5)
NO_STOP = (-1,)  # the id of no token
STILL = 1e-30  # a learning rate that moves no weight
TARGETS = {
    "record low1, routes": 1.06,
    "record codes, routes": 1.06,
    "record syndrome, routes": 1.06,
    "train guided by low1": 1.08,
    "train guided by codes": 1.08,
    "train guided by syndrome": 1.15,
}


def settings_of(config, method: str, audit: bool = False) -> Settings:
    """The Settings of a method with its own encoding, without noise and learning."""
    config = config.copy_and_resolve_references()
    config.method, config.guidance.encoding = method, ""
    config.engine_noise, config.rl.learning_rate = 0.0, STILL
    config.guidance.audit_sequences *= audit
    return resolve(config)


def rollout_program(settings: Settings, packed: dict, routes: bool = True) -> Callable[[], Rollout]:
    """Samples a batch of random prompts; without `routes` the compiler drops their record too."""
    sampler = dataclasses.replace(settings.sampler(), stop_ids=NO_STOP)
    shape = (settings.rollout.batch, settings.rollout.prompt_length)
    prompts_BP = jax.random.randint(jax.random.key(1), shape, 0, 256)  # bytes
    length_B = jnp.full(shape[0], shape[1])

    @jax.jit
    def sample(packed):
        ids_B = jnp.arange(shape[0])
        rollout = sampler(packed, prompts_BP, length_B, jax.random.key(2), ids_B, 1.0)
        return rollout if routes else dataclasses.replace(rollout, routes_LBTA=None)

    return lambda: sample(packed)


def train_program(settings: Settings, params: dict, rollout: Rollout) -> Callable[[], dict]:
    """Makes an update on a rollout, carries the state along and returns the metrics."""
    trainer = settings.trainer()
    advantage_B = jax.random.normal(jax.random.key(3), rollout.length_B.shape)
    batch = TrainBatch(rollout, advantage_B, jnp.ones_like(advantage_B), jax.random.key(4))
    # The state is donated: each program has its own.
    state = train_state.create(jax.tree.map(jnp.copy, params), trainer.transformation)

    def update():
        nonlocal state
        state, metrics = trainer.update(state, batch)
        return metrics

    return update


def measure(config, pairs: int) -> tuple[dict[str, overhead.Paired], dict]:
    """Paired times by what was measured, and bytes by encoding and site."""
    qat, low1, codes, syndrome = (
        settings_of(config, name) for name in ("qat", "trace", "trace_full", "trace_syndrome")
    )
    replay = dataclasses.replace(qat, method=dataclasses.replace(qat.method, replay_routes=True))
    params = decoder.init(qat.cfg, jax.random.key(qat.seed))
    packed = packing.pack_jit(params, qat.rollout_policy, qat.dtype)
    record = {
        "record routes": rollout_program(qat, packed),
        "record low1, routes": rollout_program(low1, packed),
        "record codes, routes": rollout_program(codes, packed),
        "record syndrome, routes": rollout_program(syndrome, packed),
        "record routes, audit": rollout_program(settings_of(config, "qat", audit=True), packed),
    }
    times = overhead.measure(rollout_program(qat, packed, routes=False), record, pairs)

    plain, with_low1, with_codes, with_syndrome = (
        program() for program in list(record.values())[:4]
    )
    train = {
        "train with routes replayed": train_program(replay, params, plain),
        "train guided by low1": train_program(low1, params, with_low1),
        "train guided by codes": train_program(codes, params, with_codes),
        "train guided by syndrome": train_program(syndrome, params, with_syndrome),
    }
    times |= overhead.measure(train_program(qat, params, plain), train, pairs)
    return times, {
        name: overhead.site_bytes(rollout.guidance, qat.cfg)
        for name, rollout in {
            "low1": with_low1, "codes": with_codes, "syndrome": with_syndrome,
        }.items()
    }  # fmt: skip


def main(config, workdir: str) -> None:
    """Measures, prints the tables and writes overhead.json."""
    with jax.set_mesh(meshes.make_mesh(config.mesh)):
        times, site_bytes = measure(config, REPEATS.value)
    print(f"Ratios: median of {REPEATS.value} pairs (least..largest). jax {jax.__version__}\n")
    print(overhead.time_table(times, TARGETS), overhead.bytes_table(site_bytes), sep="\n\n")
    Path(workdir).mkdir(parents=True, exist_ok=True)
    report = {
        "jax": jax.__version__,
        "config": config.to_dict(),
        "times": {name: paired.summary() for name, paired in times.items()},
        "bytes": site_bytes,
    }
    (Path(workdir) / "overhead.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    command_line.run(main, workdir="runs/overhead")
