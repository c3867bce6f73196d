"""The same sample, and the same gradient, on one device and on eight, however they are arranged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small_model
from tests.rollout.test_sampler import (
    KEY,
    PROMPT_LENGTH,
    SAMPLER,
    B,
    packed,
    prompts,
    quick_sample,
    sample,
)
from tests.small_model import CFG, DEFAULT, masters
from trace_jax.guidance.record import Guidance
from trace_jax.models import decoder
from trace_jax.parallel import mesh as meshes

MESHES = {"data=8": {"data": 8}, "data=4,fsdp=2": {"data": 4, "fsdp": 2}}
EXPERTS = {"data=2,expert=4": {"data": 2, "expert": 4}}


def on_mesh(function, sizes, batch, whole):
    """function(whole, *batch) under a mesh, the batch spread over it and the rest replicated."""
    mesh = meshes.make_mesh(sizes)
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, meshes.batch_sharding(mesh))
        whole = jax.device_put(whole, meshes.replicated(mesh))
        return function(whole, *batch)


@pytest.mark.parametrize("sizes", (MESHES | EXPERTS).values(), ids=MESHES | EXPERTS)
def test_eight_devices_draw_the_tokens_of_one(sizes):
    def run(whole, prompts_BP, length_B, id_B):
        return quick_sample(SAMPLER, whole[0], prompts_BP, length_B, whole[1], id_B, 1.0)

    batch = (prompts(), PROMPT_LENGTH, np.arange(B))
    rollout = on_mesh(run, sizes, batch, (packed(), KEY))
    assert len(rollout.tokens_BT.sharding.device_set) == 8
    one = sample()
    assert np.array_equal(rollout.tokens_BT, one.tokens_BT)
    assert np.array_equal(rollout.length_B, one.length_B)
    np.testing.assert_allclose(rollout.logp_BT, one.logp_BT, atol=1e-5)
    assert np.array_equal(rollout.head.tokens_BTH, one.head.tokens_BTH)
    for ours, theirs in zip(*map(jax.tree.leaves, (rollout.guidance, one.guidance)), strict=True):
        if theirs.dtype == np.uint8:  # codes; the outer scales may differ in their last bit
            assert np.array_equal(ours, theirs)
    assert np.array_equal(
        rollout.audit.guides["experts/mid"].bits, one.audit.guides["experts/mid"].bits
    )


@pytest.mark.parametrize("sizes", [{"data": 4, "fsdp": 2}, {"data": 2, "expert": 4}], ids=str)
def test_guided_gradient_on_eight_devices_is_that_of_one(sizes):
    """Guidance of some layers only, so that each device chooses by the layer inside its share."""
    rollout = sample()
    half = rollout.guidance

    @functools.partial(jax.jit, compiler_options=small_model.UNOPTIMIZED)
    def gradient(params, tokens_BT, routes_BLTA, guides_BL):
        guides = jax.tree.map(lambda a: a.swapaxes(0, 1), guides_BL)
        guidance = Guidance(guides, half.layers)

        def loss(params):
            out = decoder.forward(
                params, tokens_BT, CFG, policy=DEFAULT,
                guidance=guidance, routes_LBTA=routes_BLTA.swapaxes(0, 1),
            )  # fmt: skip
            return jnp.mean(jnp.sin(out.logits))

        return jax.value_and_grad(loss)(params)

    first = lambda tree: jax.tree.map(lambda a: a.swapaxes(0, 1), tree)
    batch = (rollout.tokens_BT, first(rollout.routes_LBTA), first(half.guides))
    one, one_grads = gradient(masters(), *batch)
    many, many_grads = on_mesh(gradient, sizes, batch, masters())
    np.testing.assert_allclose(one, many, rtol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (many_grads, one_grads)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)
