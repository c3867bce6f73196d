"""Weights for a rollout: the very numbers that training makes of the masters on the fly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small_model
from tests.small_model import (
    CFG,
    DEFAULT,
    EVERYTHING,
    SITES,
    forward,
    masters,
    quick_forward,
)
from trace_jax.formats import block_scaled, nvfp4
from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.guidance import policy
from trace_jax.guidance.policy import NOTHING
from trace_jax.models import packing
from trace_jax.models.layer_context import LayerContext
from trace_jax.models.parameters import weight

pack = jax.jit(packing.pack, static_argnums=(1, 2))


class Reader:
    """Stands in for the module that declares a weight: hands out a leaf."""

    def __init__(self, module, leaf):
        self.name, self.leaf = module, leaf

    def variable(self, collection, name, init):
        """A variable holding the leaf."""
        return type("Variable", (), {"value": self.leaf})


def read(path, leaf, fmt_policy, dtype):
    """The Operand that a layer reads of a leaf (no layer axis)."""
    module, name = path.split("/")
    return weight(Reader(module, leaf), name, (), (), LayerContext(fmt_policy, dtype), 1.0)


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_4over6", "mxfp4", "mxfp4_w4a8"])
def test_packed_weights_are_those_made_on_the_fly(fmt):
    everything, dtype = policy.resolve([("*", fmt)], SITES), jnp.dtype("bfloat16")

    @jax.jit
    def operands(layers):
        """What layer 1 reads of each weight."""
        found = [path.split("/") for path, site in policy.WEIGHT_SITE.items() if site in SITES]
        return {
            name: read(f"{module}/{name}", layers[module][name][1], everything, dtype)
            for module, *names in found
            for name in names
        }

    fresh = operands(masters()["layers_0"]["0"])
    stored = operands(pack(masters(), everything, dtype)["layers_0"]["0"])
    assert fresh["o"].values.dtype == dtype
    assert jax.tree.all(jax.tree.map(np.array_equal, fresh, stored))


def test_gate_and_up_share_one_outer_scale_an_expert():
    experts = pack(masters(), DEFAULT, jnp.float32)["layers_0"]["0"]["experts"]
    assert experts["gate_up"].outer.shape == (CFG.num_layers, CFG.num_experts)
    assert experts["down"].outer.shape == (CFG.num_layers, CFG.num_experts)
    largest_LE = jnp.max(jnp.abs(masters()["layers_0"]["0"]["experts"]["gate_up"]), axis=(-1, -2))
    assert np.array_equal(experts["gate_up"].outer, 1 / nvfp4.encoding_scale(largest_LE))


def test_what_is_packed_and_what_stays():
    packed = pack(masters(), DEFAULT, jnp.bfloat16)
    layers = packed["layers_0"]["0"]
    assert isinstance(layers["experts"]["gate_up"], BlockScaled)
    assert isinstance(layers["experts"]["down"], BlockScaled)
    in_bf16 = (packed["embed"], packed["head"], *(layers["attention"][w] for w in "qkvo"))
    assert {leaf.dtype.name for leaf in in_bf16} == {"bfloat16"}
    assert layers["experts"]["router"].dtype == jnp.float32
    assert layers["attention"]["k_norm"]["scale"].dtype == jnp.float32
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    experts = {name: masters()["layers_0"]["0"]["experts"][name] for name in ("gate_up", "down")}
    ratio = size(experts) / 2 / size({name: layers["experts"][name] for name in experts})
    assert 3.5 < ratio < 16 / 4.5  # against BF16; one outer scale a matrix is the difference


def test_logits_from_packed_and_from_master_weights_are_the_same_bits():
    dtype = jnp.dtype("bfloat16")
    logits = [
        forward(params, small_model.tokens(), CFG, policy=EVERYTHING, dtype=dtype).logits
        for params in (masters(), pack(masters(), EVERYTHING, dtype))
    ]
    assert np.array_equal(*logits)


def test_plain_forward_of_packed_weights_is_that_of_their_dequantized_values():
    """No policy: nothing is quantized on the fly; packed leaves are read as what they stand for."""
    packed = pack(masters(), DEFAULT, jnp.dtype("float32"))
    is_packed = lambda leaf: isinstance(leaf, BlockScaled)
    plain = jax.tree.map(
        lambda leaf: block_scaled.dequantize(leaf) if is_packed(leaf) else leaf,
        packed,
        is_leaf=is_packed,
    )
    logits = [quick_forward(p, small_model.tokens(), CFG).logits for p in (packed, plain)]
    np.testing.assert_allclose(*logits, atol=2e-5)


def test_nothing_quantized_packs_to_a_cast():
    packed = pack(masters(), NOTHING, jnp.float32)
    assert jax.tree.all(jax.tree.map(np.array_equal, packed, masters()))
