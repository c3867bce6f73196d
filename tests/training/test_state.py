"""Optimizer, schedule, and where the parameters lie on a mesh."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.small_model import CFG, masters
from trace_jax.parallel import mesh as meshes
from trace_jax.training import state as train_state


def test_the_optimizer_is_adam_after_clipping_the_global_norm():
    transformation = train_state.optimizer(0.1, max_grad_norm=1.0)
    params = {"a": np.array([1.0, 2.0], np.float32), "b": np.array([3.0], np.float32)}
    grads = [np.array([3.0, 0.0, 4.0]), np.array([0.3, 0.0, -0.4])]  # norms 5 and 0.5
    state = train_state.create(params, transformation)
    opt_state, m, v, w = state.opt_state, 0, 0, np.array([1.0, 2.0, 3.0])
    for t, g in enumerate(grads, start=1):
        tree = {"a": g[:2].astype(np.float32), "b": g[2:].astype(np.float32)}
        updates, opt_state = transformation.update(tree, opt_state, params)
        params = optax.apply_updates(params, updates)
        g = g / max(1, np.linalg.norm(g))
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        w = w - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    np.testing.assert_allclose(np.concatenate([params["a"], params["b"]]), w, rtol=1e-5)
    assert state.step == 0


def test_trainers_that_are_made_alike_are_equal_and_compile_once():
    first, again, other = (train_state.optimizer(rate, 1.0) for rate in (0.1, 0.1, 0.2))
    assert first == again != other


def test_the_schedule_falls_to_zero_on_a_half_cosine():
    schedule = train_state.cosine(2.0, 10)
    assert [float(schedule(t)) for t in (0, 5, 10)] == pytest.approx([2, 1, 0], abs=1e-6)
    assert float(train_state.cosine(2.0, 0)(0)) == 2.0  # no steps: nothing divides by zero


def test_masters_lie_where_the_rules_say():
    mesh = meshes.make_mesh({"data": 1, "fsdp": 2, "expert": 2, "tensor": 2})
    placed = train_state.parameter_shardings(CFG, masters(), mesh)
    specs = jax.tree.map(lambda sharding: sharding.spec, placed)
    experts, attention = specs["layers_0"]["0"]["experts"], specs["layers_0"]["0"]["attention"]
    assert experts["gate_up"] == P(None, "expert", "tensor", "fsdp")
    assert experts["down"] == P(None, "expert", "fsdp", "tensor")
    assert experts["router"] == P(None, "expert", "fsdp")
    assert attention["q"] == P(None, "tensor", "fsdp")
    assert attention["o"] == P(None, "fsdp", "tensor")
    assert specs["embed"] == P("tensor", "fsdp")
    assert specs["final_norm"]["scale"] == P(None)


def test_a_shard_that_would_cut_a_block_is_refused():
    mesh = meshes.make_mesh({"data": 2, "fsdp": 4})
    with pytest.raises(ValueError, match="axis 'embed' of size 32 does not split over mesh axis"):
        train_state.parameter_shardings(CFG, masters(), mesh)
