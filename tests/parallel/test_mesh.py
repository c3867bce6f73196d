"""The mesh and its rules: sizes that fit, specs, errors that name the axis, shares of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from trace_jax.models import config, decoder
from trace_jax.parallel import mesh as meshes
from trace_jax.training import state as train_state


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"data": 8}, (8, 1, 1, 1)),
        ({"data": -1}, (8, 1, 1, 1)),
        ({"data": -1, "fsdp": 2, "tensor": 2}, (2, 2, 1, 2)),
        ({"expert": 4, "fsdp": -1}, (1, 2, 4, 1)),
    ],
)
def test_sizes(sizes, shape):
    mesh = meshes.make_mesh(sizes)
    assert tuple(mesh.shape[axis] for axis in meshes.MESH_AXES) == shape
    assert mesh.devices.size == 8


def test_one_device():
    mesh = meshes.make_mesh({}, jax.devices()[:1])
    assert set(mesh.shape.values()) == {1}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 4}, r"'data': 4.* needs 4 devices, there are 8; set one axis to -1"),
        ({"data": 3, "fsdp": -1}, r"needs 6 devices, there are 8"),
        ({"data": 16, "fsdp": -1}, r"needs 16 devices, there are 8"),
        ({"data": 0, "fsdp": -1}, r"'data': 0.* sizes must be positive, or -1 once"),
        ({"data": -1, "fsdp": -1}, r"sizes must be positive, or -1 once"),
        ({"data": -2, "fsdp": -4}, r"sizes must be positive, or -1 once"),
        ({"batch": 8}, r"mesh axes \['batch'\] are unknown: choose among .*'data', 'fsdp'"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        meshes.make_mesh(sizes)


def spec(axes, shape, sizes, block=16):
    return meshes.parameter_spec(axes, shape, meshes.make_mesh(sizes), block)


def test_parameters_lie_where_the_rules_say():
    sizes = {"fsdp": 2, "expert": 2, "tensor": 2}
    gate_up = ("layers", "expert", "mlp", "embed")
    assert spec(gate_up, (4, 8, 128, 64), sizes) == P(None, "expert", "tensor", "fsdp")
    assert spec(("layers", "embed", "heads"), (4, 64, 64), sizes) == P(None, "fsdp", "tensor")
    assert spec(("layers", "norm"), (4, 64), sizes) == P(None, None)
    assert spec(gate_up, (4, 8, 128, 64), {"data": 8}) == P(None, None, None, None)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (
            ("heads", "mlp"),
            (64, 64),
            r"use a mesh axis twice: \['tensor', 'tensor'\]; change RULES",
        ),
        (("expert", "embed"), (6, 64), r"'expert' of size 6 does not split over .*'expert' of 4"),
        (
            ("vocab", "embed"),
            (32, 48),
            r"'embed' of size 48 does not split over mesh axis 'fsdp' of 2 in multiples of 16",
        ),
    ],
)
def test_parameters_that_do_not_split(axes, shape, message):
    sizes = {"tensor": 8} if axes[0] == "heads" else {"fsdp": 2, "expert": 4}
    with pytest.raises(ValueError, match=message):
        spec(axes, shape, sizes)


def test_a_shard_of_the_contraction_holds_whole_blocks():
    """Size 32 on 2 devices: one block of 16 each, but half a block of 32."""
    assert spec(("vocab", "embed"), (32, 32), {"data": 4, "fsdp": 2}) == P(None, "fsdp")
    with pytest.raises(ValueError, match="in multiples of 32"):
        spec(("vocab", "embed"), (32, 32), {"data": 4, "fsdp": 2}, block=32)


def test_a_function_of_the_batch_runs_on_each_devices_share():
    """Values, and gradients of what all devices hold whole, are those of one device."""

    def function(x_BD, rows_B, w_D):
        return x_BD * w_D, {"size": jnp.zeros_like(rows_B) + x_BD.shape[0]}

    def loss(w_D, x_BD, rows_B):
        y_BD, aux = meshes.over_batch(function, x_BD, rows_B, whole=(w_D,))
        return jnp.sum(jnp.sin(y_BD)), aux["size"]

    x_BD, rows_B, w_D = jnp.arange(16.0).reshape(8, 2), jnp.zeros(8), jnp.array([1.0, 2.0])
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, size_B), gradient = run(w_D, x_BD, rows_B)
    assert np.all(size_B == 8)  # no mesh: a plain call
    with jax.set_mesh(meshes.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})):
        (sharded_value, size_B), sharded_gradient = run(w_D, x_BD, rows_B)
        assert np.all(size_B == 2)
    np.testing.assert_allclose(sharded_value, value, rtol=1e-6)
    np.testing.assert_allclose(sharded_gradient, gradient, rtol=1e-5)


@pytest.mark.parametrize("name", config.MODELS)
def test_every_model_splits_over_tensor_and_expert_axes(name):
    """At its true size: no leaf of any family stands in the way."""
    cfg = config.get(name)
    params = jax.eval_shape(lambda key: decoder.init(cfg, key), jax.random.key(0))
    for sizes in ({"tensor": 2, "fsdp": 4}, {"tensor": 2, "expert": 4}):
        mesh = meshes.make_mesh({"data": 1, **sizes})
        placed = train_state.parameter_shardings(cfg, params, mesh)
        assert any("tensor" in sharding.spec for sharding in jax.tree.leaves(placed))
