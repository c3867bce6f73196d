"""Sizes: parameter counts against the published and the real ones, errors that name the key."""

import dataclasses
import math

import jax
import pytest

from tests.small_model import CFG
from trace_jax.models import config, decoder


# qwen.md 1.2: 30.53B / 3.35B and 235.1B / 22.2B; the totals are those of the released checkpoints.
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704),
        ("qwen3_235b_a22b", 235_093_634_560, 22_190_763_520),
    ],
)
def test_parameter_counts(name, total, active):
    cfg = config.get(name)
    assert config.total_parameters(cfg) == total
    assert config.active_parameters(cfg) == active


@pytest.mark.parametrize("cfg", [CFG, config.get("qwen3_30b_a3b")], ids=["small", "30b"])
def test_count_is_that_of_the_tree(cfg):
    params = jax.eval_shape(lambda key: decoder.init(cfg, key), jax.random.key(0))
    leaves = jax.tree.leaves(params)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == config.total_parameters(cfg)
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}


def test_every_parameter_names_its_axes():
    params = jax.eval_shape(lambda key: decoder.init(CFG, key), jax.random.key(0))
    axes = decoder.logical_axes(CFG)
    is_axes = lambda leaf: isinstance(leaf, tuple)
    named = jax.tree.map(len, axes, is_leaf=is_axes)
    assert named == jax.tree.map(lambda leaf: leaf.ndim, params)
    assert axes["layers"]["experts"]["gate_up"] == ("layers", "expert", "mlp", "embed")
    assert axes["layers"]["attention"]["o"] == ("layers", "embed", "heads")
    assert axes["embed"] == ("vocab", "embed")


@pytest.mark.parametrize("name", sorted(config.MODELS))
def test_tiny_keeps_the_structure(name):
    full = config.get(name)
    tiny = config.tiny(full)
    assert config.total_parameters(tiny) < 1e6
    assert tiny.num_heads > tiny.num_kv_heads > 1
    assert 1 < tiny.num_experts_per_token < tiny.num_experts
    assert tiny.norm_topk_prob == full.norm_topk_prob


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "model.num_heads=3 is not a multiple of model.num_kv_heads=2"),
        ({"num_experts_per_token": 5}, "model.num_experts_per_token=5 exceeds model.num_experts=4"),
        ({"head_dim": 15}, "model.head_dim=15"),
        ({"hidden_size": 0}, "model.hidden_size=0: must be a positive integer"),
        ({"vocab_size": 1.5}, "model.vocab_size=1.5: must be a positive integer"),
    ],
)
def test_sizes_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CFG, **change)


def test_unknown_model_lists_the_choices():
    with pytest.raises(ValueError, match=r"model='qwen2' is unknown.*qwen3_235b_a22b"):
        config.get("qwen2")
