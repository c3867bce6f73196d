"""A dense model, as a mixture, gives the numbers of the dense one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.reference import softmax
from tests.small_model import forward, masters, tokens
from trace_jax.guidance import policy
from trace_jax.models import architecture, config, packing
from trace_jax.models.architecture import ModelConfig
from trace_jax.models.upcycle import upcycle

D, F, E = 32, 64, 4
CFG = ModelConfig(
    vocab_size=32, hidden_size=D, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=F, qk_norm=False, tie_embeddings=True, initializer_range=0.25,
)  # fmt: skip


def largest_difference(params, cfg):
    dense_BTV = forward(masters(CFG), tokens(), CFG).logits
    assert float(jnp.max(jnp.abs(dense_BTV))) > 1  # so that the bounds say something
    return float(jnp.max(jnp.abs(forward(params, tokens(), cfg).logits - dense_BTV)))


def test_copies_give_the_dense_numbers_whatever_the_router():
    params, cfg = upcycle(masters(CFG), CFG, E, 2, "copy", router_std=1.0)
    assert (cfg.num_experts, cfg.num_experts_per_token) == (E, 2)
    assert (cfg.moe_intermediate_size, cfg.intermediate_size) == (F, 0)
    assert largest_difference(params, cfg) < 1e-5


def test_slices_give_the_dense_numbers_where_all_are_chosen_alike():
    params, cfg = upcycle(masters(CFG), CFG, E, E, "split", router_std=0.0)
    assert cfg.moe_intermediate_size == F // E
    assert largest_difference(params, cfg) < 1e-5
    assert config.total_parameters(cfg) == config.total_parameters(CFG) + 2 * E * D  # the routers


def test_of_fewer_slices_each_counts_by_its_weight():
    """y = sum over the chosen of k p_e / sum(p) times the slice's own part of the dense output."""
    params, cfg = upcycle(masters(CFG), CFG, E, 2, "split", jax.random.key(3))
    experts = jax.tree.map(lambda leaf: np.float64(leaf[1]), params["layers_0"]["0"]["experts"])
    dense = jax.tree.map(lambda leaf: np.float64(leaf[1]), masters(CFG)["layers_0"]["0"]["mlp"])
    x_D = np.random.default_rng(0).normal(size=D)
    gate_F, up_F = np.split(dense["gate_up"] @ x_D, 2)
    hidden_F = gate_F / (1 + np.exp(-gate_F)) * up_F
    logits_E = experts["router"] @ x_D
    chosen = np.argsort(-logits_E)[:2]
    share = softmax(logits_E[chosen])
    expected_D, found_D = np.zeros(D), np.zeros(D)
    for e, weight in zip(chosen, share, strict=True):
        units = slice(e * F // E, (e + 1) * F // E)
        expected_D += 2 * weight * dense["down"][:, units] @ hidden_F[units]
        gate, up = np.split(experts["gate_up"][e] @ x_D, 2)
        found_D += weight * experts["down"][e] @ (gate / (1 + np.exp(-gate)) * up)
    np.testing.assert_allclose(found_D, expected_D, rtol=1e-6, atol=1e-6)
    assert np.all(np.abs(share - 0.5) < 0.1)  # the router is small
    assert cfg.norm_topk_prob


def test_routers_come_from_the_key_and_the_rest_is_as_it_was():
    dense, key = masters(CFG), jax.random.key(1)
    params, _ = upcycle(dense, CFG, E, 2, key=key)
    again, _ = upcycle(dense, CFG, E, 2, key=key)
    other, _ = upcycle(dense, CFG, E, 2, key=jax.random.key(2))
    router = lambda tree: np.asarray(tree["layers_0"]["0"]["experts"]["router"])
    assert router(params).shape == (2, E, D)
    np.testing.assert_array_equal(router(params), router(again))
    assert not np.any(router(params) == router(other))
    assert not np.any(router(params)[0] == router(params)[1])
    assert params["embed"] is dense["embed"]
    assert params["layers_0"]["0"]["attention"] is dense["layers_0"]["0"]["attention"]
    assert "mlp" in dense["layers_0"]["0"]
    assert "mlp" not in params["layers_0"]["0"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (dict(num_experts=4, num_experts_per_token=2, how="cut"), r"how='cut': choose one of"),
        (dict(num_experts=3, num_experts_per_token=2, how="split"), "=3 does not divide"),
        (dict(num_experts=2, num_experts_per_token=3), "num_experts_per_token=3 exceeds"),
        (dict(num_experts=0, num_experts_per_token=0), "num_experts=0: must be 1 or more"),
    ],
)
def test_bad_choices_are_named(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        upcycle(masters(CFG), CFG, **arguments)


def test_only_dense_masters_are_upcycled():
    params, cfg = upcycle(masters(CFG), CFG, E, 2)
    with pytest.raises(ValueError, match="num_experts=4: only a dense model"):
        upcycle(params, cfg, E, 2)
    fp4 = policy.resolve([("mlp/*", "nvfp4")], architecture.sites(CFG))
    packed = packing.pack(masters(CFG), fp4, jnp.float32)
    with pytest.raises(ValueError, match=r"mlp/down is a BlockScaled: upcycle masters"):
        upcycle(packed, CFG, E, 2)
