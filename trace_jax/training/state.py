"""The train state: masters, optimizer, and the counters that make a resumed run the same run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from trace_jax.models import decoder
from trace_jax.models.architecture import ModelConfig
from trace_jax.parallel import mesh as meshes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that an update changes."""

    params: dict  # float32 masters
    opt_state: optax.OptState
    step: jax.Array  # int32: RL steps done, which is also the policy's version


def clipped_adam(
    learning_rate: float | optax.Schedule | jax.Array, max_grad_norm: float
) -> optax.GradientTransformation:
    """Adam (0.9, 0.95) after clipping the global gradient norm."""
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm), optax.adam(learning_rate, b1=0.9, b2=0.95)
    )


@functools.cache
def optimizer(
    learning_rate: float | optax.Schedule, max_grad_norm: float
) -> optax.GradientTransformation:
    """`clipped_adam`, the same one for the same arguments.

    So trainers that are made alike are equal, and compile once.
    """
    return clipped_adam(learning_rate, max_grad_norm)


def cosine(learning_rate: float, steps: int) -> optax.Schedule:
    """A learning rate that falls on a half cosine to zero over `steps` updates."""
    return optax.cosine_decay_schedule(learning_rate, max(steps, 1))


def create(params: dict, transformation: optax.GradientTransformation) -> TrainState:
    """A TrainState at step 0 with fresh optimizer statistics."""
    return TrainState(params, transformation.init(params), jnp.int32(0))


def parameter_shardings(cfg: ModelConfig, params: dict, mesh: jax.sharding.Mesh) -> dict:
    """The tree of NamedShardings of the masters; optimizer moments, made from them, follow.

    Raises ValueError where a rule does not fit the model (parallel/mesh.py).
    """

    def place(axes, leaf):
        spec = meshes.parameter_spec(axes, leaf.shape, mesh, block=16)
        return jax.sharding.NamedSharding(mesh, spec)

    is_axes = lambda leaf: isinstance(leaf, tuple)
    return jax.tree.map(place, decoder.logical_axes(cfg), params, is_leaf=is_axes)
