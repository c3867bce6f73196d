"""The device mesh and the one table that says which logical axis lies on which mesh axis.

Mesh axes: `data`, `fsdp` and `expert` split the batch; `fsdp`, `expert` and `tensor` split
parameters. Devices along `expert` hold different experts, and exchange tokens for that layer only.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESH_AXES = ("data", "fsdp", "expert", "tensor")
BATCH = ("data", "fsdp", "expert")
REPLICATED = P()

RULES = {  # logical axis of a parameter -> mesh axis, or None for replicated
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "expert": "expert",
    "mlp": "tensor",
    "norm": None,
}


def make_mesh(sizes: Mapping[str, int], devices: list | None = None) -> Mesh:
    """The Mesh over `devices` (default: all); one size may be -1 and takes what is left.

    Raises ValueError for an unknown axis or when the sizes do not use the devices exactly.
    """
    devices = jax.devices() if devices is None else devices
    unknown = set(sizes) - set(MESH_AXES)
    if unknown:
        raise ValueError(f"mesh axes {sorted(unknown)} are unknown: choose among {MESH_AXES}")
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
        raise ValueError(f"mesh {dict(sizes)}: sizes must be positive, or -1 once")
    if -1 in shape:
        shape[shape.index(-1)] = max(1, len(devices) // -math.prod(shape))
    if math.prod(shape) != len(devices):
        raise ValueError(
            f"mesh {dict(zip(MESH_AXES, shape, strict=True))} needs {math.prod(shape)} devices, "
            f"there are {len(devices)}; set one axis to -1 or make the product equal"
        )
    grid = np.array(devices).reshape(shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def parameter_spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, block: int
) -> P:
    """The PartitionSpec of a parameter with logical `axes` and `shape`.

    Raises ValueError, naming the axis, where a mesh axis is used twice, does not divide the size,
    or would leave a shard of the last axis (the contraction, blocked) that is no multiple of
    `block`.
    """
    chosen = [RULES[axis] if axis else None for axis in axes]
    chosen = [axis if axis and mesh.shape[axis] > 1 else None for axis in chosen]
    used = [axis for axis in chosen if axis]
    if len(set(used)) != len(used):
        raise ValueError(f"parameter axes {axes} use a mesh axis twice: {chosen}; change RULES")
    contracts = len(shape) - ("layers" in axes) > 1  # a vector has no contraction, stacked or not
    for position, (axis, size) in enumerate(zip(chosen, shape, strict=True)):
        unit = block if contracts and position == len(shape) - 1 else 1
        if axis and size % (mesh.shape[axis] * unit):
            raise ValueError(
                f"axis {axes[position]!r} of size {size} does not split over mesh axis {axis!r} of "
                f"{mesh.shape[axis]} in multiples of {unit}; shrink mesh.{axis} or pad the model"
            )
    return P(*chosen)


def batch_sharding(mesh: Mesh, batch_axis: int = 0) -> NamedSharding:
    """The sharding of an array whose axis `batch_axis` holds sequences."""
    return NamedSharding(mesh, P(*(None,) * batch_axis, BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, P())


def batch_shares() -> int:
    """Into how many shares the mesh in context (`jax.set_mesh`) splits a batch; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in BATCH)


def expert_shares() -> int:
    """Over how many devices the mesh in context splits the experts; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape["expert"]


def over_batch(
    function: Callable, *arguments: Any, whole: tuple = (), whole_spec: P = REPLICATED
) -> Any:
    """function(*arguments, *whole), run by each device on its own share of the batch.

    Arguments and results are pytrees of arrays whose leading axis is the batch; `whole` is laid
    out by `whole_spec`, replicated by default. Without a mesh in context this is a plain call.
    """
    if batch_shares() == 1:
        return function(*arguments, *whole)
    share = jax.shard_map(
        function,
        in_specs=(P(BATCH),) * len(arguments) + (whole_spec,) * len(whole),
        out_specs=P(BATCH),
        check_vma=False,
    )
    return share(*arguments, *whole)
