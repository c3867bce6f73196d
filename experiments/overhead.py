"""What recording costs a rollout and guidance a training step, in time and in bytes.

    python -m experiments.overhead --config=configs/tiny_cpu.py --workdir=runs/overhead

One process, pairs of runs, random weights and prompts. The base of the rollouts records nothing at all;
the base of the training steps is `qat`, the same step without guidance. No sequence stops early and the
learning rate is 0, so every repetition does the same work; emulated noise is off, and so are audits but
where named.
"""

import dataclasses
import json
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
TARGETS = {"record low1 + routes": 1.06, "train guided by low1": 1.08, "train guided by codes": 1.08}


def settings_of(config, method: str, audit: bool = False) -> Settings:
    """The Settings of a method with its own encoding, without noise and learning."""
    config = config.copy_and_resolve_references()
    config.method, config.guidance.encoding = method, ""
    config.engine_noise, config.rl.learning_rate = 0.0, 0.0
    config.guidance.audit_sequences *= audit
    return resolve(config)


def rollout_program(settings: Settings, packed: dict, routes: bool = True):  # noqa: ANN201
    """A function of nothing that samples a batch; without `routes` the compiler drops them too."""
    sampler = dataclasses.replace(settings.sampler(), stop_ids=NO_STOP)
    shape = (settings.rollout.batch, settings.rollout.prompt_length)
    prompts_BP = jax.random.randint(jax.random.key(1), shape, 0, settings.tokenizer.stop_ids[0])
    length_B = jnp.full(shape[0], shape[1])

    @jax.jit
    def sample(packed):
        rollout = sampler(packed, prompts_BP, length_B, jax.random.key(2), jnp.arange(shape[0]), 1.0)
        return rollout if routes else dataclasses.replace(rollout, routes_LBTA=None)

    return lambda: sample(packed)


def train_program(settings: Settings, params: dict, rollout: Rollout):  # noqa: ANN201
    """A function of nothing that makes one update on a rollout, its state carried along."""
    trainer = settings.trainer()
    advantage_B = jax.random.normal(jax.random.key(3), rollout.length_B.shape)
    batch = TrainBatch(rollout, advantage_B, jnp.ones_like(advantage_B), jax.random.key(4))
    # The state is donated, so each program has its own.
    held = [train_state.create(jax.tree.map(jnp.copy, params), trainer.transformation)]

    def update():
        held[0], metrics = trainer.update(held[0], batch)
        return metrics

    return update


def site_bytes(settings: Settings, rollout: Rollout) -> dict[str, tuple[int, float]]:
    """By site: bytes of a token and layer as the arrays hold them, and by the formula."""
    cfg, formats = settings.cfg, dict(settings.quantized.formats)
    rows = {"attention/k": cfg.num_kv_heads, "attention/v": cfg.num_kv_heads}
    rows["experts/mid"] = cfg.num_experts_per_token
    width = {
        "attention/in": cfg.hidden_size,
        "attention/k": cfg.head_dim,
        "attention/v": cfg.head_dim,
        "attention/out": cfg.num_heads * cfg.head_dim,
        "experts/in": cfg.hidden_size,
        "experts/mid": cfg.moe_intermediate_size,
    }
    return {
        site: (
            overhead.guide_bytes(guide),
            overhead.formula_bytes(width[site], rows.get(site, 1), formats[site], guide.encoding),
        )
        for site, guide in rollout.guidance.guides.items()
    }


def measure(config, repeats: int) -> dict:
    """Paired times by name, and bytes by encoding and site."""
    qat, trace, full = (settings_of(config, name) for name in ("qat", "trace", "trace_full"))
    params = decoder.init(qat.cfg, jax.random.key(qat.seed))
    packed = packing.pack_jit(params, qat.rollout_policy, qat.dtype)
    sampled = {
        "record routes": rollout_program(qat, packed),
        "record low1 + routes": rollout_program(trace, packed),
        "record codes + routes": rollout_program(full, packed),
        "record routes, audit": rollout_program(settings_of(config, "qat", audit=True), packed),
    }
    nothing = rollout_program(qat, packed, routes=False)
    times = overhead.measure(nothing, sampled, repeats)
    low1, codes = (sampled[f"record {name} + routes"]() for name in ("low1", "codes"))
    plain = sampled["record routes"]()
    replay = dataclasses.replace(qat, method=dataclasses.replace(qat.method, replay_routes=True))
    trained = {
        "train with routes replayed": train_program(replay, params, plain),
        "train guided by low1": train_program(trace, params, low1),
        "train guided by codes": train_program(full, params, codes),
    }
    times |= overhead.measure(train_program(qat, params, plain), trained, repeats)
    return times, {"low1": site_bytes(trace, low1), "codes": site_bytes(full, codes)}


def main(config, workdir: str) -> None:
    """Measures, prints the tables and writes overhead.json."""
    with jax.set_mesh(meshes.make_mesh(config.mesh)):
        times, record_bytes = measure(config, REPEATS.value)
    print(overhead.table(times, TARGETS))
    print(overhead.bytes_table(record_bytes))
    Path(workdir).mkdir(parents=True, exist_ok=True)
    report = {
        "times": {name: overhead.summary(paired) for name, paired in times.items()},
        "bytes": record_bytes,
    }
    (Path(workdir) / "overhead.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    command_line.run(main, workdir="runs/overhead")
