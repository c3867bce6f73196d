"""Checkpoints give back every bit, also of packed records, and say what does not fit."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trace_jax.formats import nvfp4
from trace_jax.guidance import quantizer
from trace_jax.guidance.record import Guidance
from trace_jax.parallel import mesh as meshes
from trace_jax.rollout.log_probs import Head
from trace_jax.rollout.sampler import Rollout
from trace_jax.training import state as train_state
from trace_jax.training.checkpoint import Checkpoints

ADAM = train_state.optimizer(0.1, 1.0)


def state(seed=0, width=16):
    draw = np.random.default_rng(seed).normal(size=(8, width)).astype(np.float32)
    made = train_state.create({"layer": {"w": jnp.asarray(draw)}, "b": jnp.ones(3)}, ADAM)
    return dataclasses.replace(made, step=jnp.int32(seed))


def rollout(seed):
    """Small, with float8 scales, uint8 codes and routes, a static field and an absent audit."""
    x = jax.random.normal(jax.random.key(seed), (2, 3, 5, 32))
    guide = quantizer.encode(nvfp4.quantize(x), "low1")
    guidance = Guidance({"experts/in": guide}, (("experts/in", (0, 1)),))
    ints = jax.random.randint(jax.random.key(seed), (3, 5), 0, 250, jnp.int32)
    return Rollout(
        ints, ints[:, 0], ints[:, 1], x[0, :, :, 0], ints[None, :, :, None].astype(jnp.uint8),
        guidance, None, None, jnp.int32(seed), Head(ints[:, :, None], x[0, :, :, :1]),
    )  # fmt: skip


def same(left, right):
    left, right = jax.tree.leaves_with_path(left), jax.tree.leaves_with_path(right)
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, a), (_, b) in zip(left, right, strict=True):
        assert a.dtype == b.dtype, path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


@pytest.fixture
def store(tmp_path):
    opened = Checkpoints(tmp_path / "checkpoints")
    yield opened
    opened.close()


@pytest.mark.parametrize("queued", [0, 2])
def test_everything_comes_back_to_the_last_bit(store, queued):
    key, queue = jax.random.key(42), [rollout(seed) for seed in range(queued)]
    assert store.latest() is None
    store.save(3, state(7), key, queue)
    assert store.latest() == 3
    found, found_key = store.restore_state(3, state(0))
    same(found, state(7))
    assert np.array_equal(jax.random.key_data(found_key), jax.random.key_data(key))
    restored = store.restore_queue(3, jax.eval_shape(lambda: rollout(0)))
    assert len(restored) == queued
    for one, original in zip(restored, queue, strict=True):
        same(one, original)
        assert one.audit is None
        assert one.guidance.guides["experts/in"].encoding == "low1"


def test_the_newest_two_are_kept_and_a_step_may_be_saved_again(store, tmp_path):
    for step in (0, 2, 4, 4):
        store.save(step, state(step + 1), jax.random.key(0), [])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "4"]
    same(store.restore_state(2, state(0))[0], state(3))


def test_what_a_kill_leaves_half_written_is_not_a_checkpoint(store, tmp_path):
    store.save(2, state(2), jax.random.key(0), [])
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "2", checkpoints / "4.orbax-checkpoint-tmp")
    (checkpoints / "6.orbax-checkpoint-tmp").mkdir()
    again = Checkpoints(checkpoints)
    assert again.latest() == 2
    same(again.restore_state(2, state(0))[0], state(2))
    again.save(4, state(4), jax.random.key(0), [])
    same(again.restore_state(again.latest(), state(0))[0], state(4))
    again.close()


def test_another_shape_is_named(store):
    store.save(0, state(), jax.random.key(0), [])
    message = (
        r"checkpoint step 0: state/params/layer/w is \(8, 16\) there, but the model wants "
        r"\(8, 32\); use the configuration it was made with, or another --workdir"
    )
    with pytest.raises(ValueError, match=message):
        store.restore_state(0, state(width=32))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"b": jnp.ones(3)}, r"params/layer/w is \(8, 16\) there, but the model wants no such"),
        (
            {"b": jnp.ones(3), "layer": {"w": jnp.ones((8, 16)), "u": jnp.ones(2)}},
            r"params/layer/u is missing there, but the model wants \(2,\)",
        ),
    ],
)
def test_another_structure_is_named(store, params, message):
    store.save(0, state(), jax.random.key(0), [])
    with pytest.raises(ValueError, match=message):
        store.restore_state(0, train_state.create(params, ADAM))


def test_a_checkpoint_of_one_device_comes_back_on_a_mesh(store):
    store.save(0, state(5), jax.random.key(0), [])
    mesh = meshes.make_mesh({"fsdp": 2, "data": 4})
    split = NamedSharding(mesh, P(None, "fsdp"))
    params = {"layer": {"w": jax.device_put(jnp.zeros((8, 16)), split)}, "b": jnp.ones(3)}
    found, _ = store.restore_state(0, train_state.create(params, ADAM))
    same(found, state(5))
    assert found.params["layer"]["w"].sharding == split
