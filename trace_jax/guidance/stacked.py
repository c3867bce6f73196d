"""Trees whose arrays are stacked over some of the layers: guides, keys and values, states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def row_among(layers: tuple[int, ...], layer: jax.Array) -> jax.Array:
    """Where a layer stands among `layers`, ascending; some row of theirs where it is none."""
    return jnp.asarray(np.searchsorted(layers, np.arange(max(layers) + 1)))[layer]


def at_row(stacked: Any, row: jax.Array) -> Any:
    """The arrays of one layer of a tree that is stacked over layers."""
    pick = lambda a: jax.lax.dynamic_index_in_dim(a, row, 0, keepdims=False)
    return jax.tree.map(pick, stacked)
