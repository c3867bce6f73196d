"""Sizes: parameter counts against the published and the real ones, errors that name the key."""

import dataclasses
import math

import jax
import pytest

from tests.small_model import CFG
from trace_jax.models import architecture, config, decoder

# qwen.md 1.2, billions; active parameters count embedding and head.
COUNTS = {
    "qwen3_30b_a3b": (30.53, 3.35),
    "qwen3_235b_a22b": (235.1, 22.2),
    "qwen3_next_80b_a3b": (79.7, 3.87),
    "qwen3_5_35b_a3b": (34.66, 3.45),
    "qwen3_5_122b_a10b": (122.1, 9.77),
    "qwen3_5_397b_a17b": (396.3, 17.35),
    "qwen3_6_35b_a3b": (34.66, 3.45),
    "qwen3_8_2_4t_a95b": (2419.8, 95.3),
    "qwen3_8_flash_next": (125.7, 6.0 + 2 * 248320 * 2560 / 1e9),  # there 6.0 without embeddings
}


def test_every_model_has_its_published_count():
    assert set(COUNTS) == set(config.MODELS)


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    """To the digits that are published."""
    cfg, (total, active) = config.get(name), COUNTS[name]
    assert config.total_parameters(cfg) / 1e9 == pytest.approx(total, abs=0.06, rel=2e-3)
    assert config.active_parameters(cfg) / 1e9 == pytest.approx(active, abs=0.04)


def test_counts_to_the_last_parameter():
    """The totals of the released checkpoints."""
    assert config.total_parameters(config.get("qwen3_30b_a3b")) == 30_532_122_624
    assert config.total_parameters(config.get("qwen3_235b_a22b")) == 235_093_634_560


def test_the_hashed_table_of_flash_next():
    """320,001,536 rows of 160: 16 primes from 20,000,000 on, padded (qwen.md 1.2)."""
    ngram = config.get("qwen3_8_flash_next").ngram
    assert sum(config.ngram_primes(ngram)) == 320_001_446
    assert config.ngram_rows(ngram) == 320_001_536
    assert ngram.row_width == 160
    assert config.ngram_table_parameters(config.get("qwen3_30b_a3b")) == 0


@pytest.mark.parametrize("cfg", [CFG, *config.MODELS.values()], ids=["small", *config.MODELS])
def test_count_is_that_of_the_tree(cfg):
    params = jax.eval_shape(lambda key: decoder.init(cfg, key), jax.random.key(0))
    leaves = jax.tree.leaves(params)
    counted = config.total_parameters(cfg) + config.ngram_table_parameters(cfg)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == counted
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}


def test_every_parameter_names_its_axes():
    params = jax.eval_shape(lambda key: decoder.init(CFG, key), jax.random.key(0))
    axes = decoder.logical_axes(CFG)
    is_axes = lambda leaf: isinstance(leaf, tuple)
    named = jax.tree.map(len, axes, is_leaf=is_axes)
    assert named == jax.tree.map(lambda leaf: leaf.ndim, params)
    assert axes["layers_0"]["0"]["experts"]["gate_up"] == ("layers", "expert", "mlp", "embed")
    assert axes["layers_0"]["0"]["attention"]["o"] == ("layers", "embed", "heads")
    assert axes["embed"] == ("vocab", "embed")


@pytest.mark.parametrize("name", sorted(config.MODELS))
def test_tiny_keeps_the_structure(name):
    full = config.get(name)
    tiny = config.tiny(full)
    assert config.total_parameters(tiny) < 1e6
    assert tiny.num_kv_heads > 1
    assert tiny.num_heads / tiny.num_kv_heads == full.num_heads / full.num_kv_heads
    assert 1 < tiny.num_experts_per_token < tiny.num_experts
    same = ("layer_pattern", "norm_topk_prob", "attention_gate", "zero_centered_norms", "qk_norm",
            "rotary_fraction", "tie_embeddings")  # fmt: skip
    for field in same:
        assert getattr(tiny, field) == getattr(full, field)
    for field in (*architecture.PARTS, "shared_expert_size"):
        assert bool(getattr(tiny, field)) == bool(getattr(full, field))
    if delta := tiny.delta_net:
        assert delta.key_head_dim != delta.value_head_dim
        ratio = full.delta_net.num_value_heads // full.delta_net.num_key_heads
        assert delta.num_value_heads == ratio * delta.num_key_heads
    for site, of in architecture.sites(tiny).items():
        assert of.width % 32 == 0, site  # either FP4 format fits


def test_where_layers_lie():
    """Two segments: the first group alone has an n-gram embedding, in its second layer."""
    cfg = config.get("qwen3_8_flash_next")
    first, rest = architecture.segments(cfg)
    assert [kind.ngram for kind in first.kinds] == [False, True, False, False]
    assert [kind.mixer for kind in rest.kinds] == ["delta_net"] * 3 + ["attention"]
    assert (first.repeats, rest.repeats, rest.first) == (1, 11, 4)
    assert rest.layers_at(3) == tuple(range(7, 48, 4))
    places = architecture.places(cfg)
    assert places[1] == ("layers_0", "1", 0)
    assert places[47] == ("layers_4", "3", 10)


def test_a_depth_that_is_no_multiple_of_the_pattern():
    cfg = dataclasses.replace(config.get("qwen3_5_35b_a3b"), num_layers=10)
    whole, left = architecture.segments(cfg)
    assert (len(whole.kinds), whole.repeats, left.first, len(left.kinds)) == (4, 2, 8, 2)
    assert architecture.layers_with(cfg, "attention") == (3, 7)


def test_parts_come_as_mappings_too():
    """As a ConfigDict gives them."""
    full = config.tiny(config.get("qwen3_8_flash_next"))
    again = architecture.ModelConfig(**dataclasses.asdict(full))
    assert again == full
    assert hash(again) == hash(full)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "model.num_heads=3 is not a multiple of model.num_kv_heads=2"),
        ({"num_experts_per_token": 5}, "model.num_experts_per_token=5 exceeds model.num_experts=4"),
        ({"head_dim": 15}, "model.head_dim=15"),
        ({"hidden_size": 0}, "model.hidden_size=0: must be a positive integer"),
        ({"vocab_size": 1.5}, "model.vocab_size=1.5: must be a positive integer"),
        ({"num_kv_heads": True}, "model.num_kv_heads=True: must be a positive integer"),
        ({"num_experts": 0}, "model.intermediate_size=0: must be a positive integer"),
        ({"intermediate_size": 64}, "model.intermediate_size=64 is that of a dense model"),
        ({"rms_norm_eps": -1.0}, "model.rms_norm_eps=-1.0: must be a number above 0"),
        ({"rope_theta": "1e6"}, "model.rope_theta='1e6': must be a number above 0"),
        ({"rotary_fraction": 0.1}, "model.head_dim=32: rotary embedding needs an even size"),
        ({"layer_pattern": ("mamba",)}, r"model.layer_pattern=\('mamba',\)"),
        ({"layer_pattern": ("delta_net",)}, "model.delta_net: give the sizes just where"),
        ({"delta_net": {"heads": 2}}, "model.delta_net: missing .*unknown .'heads'"),
        ({"indexer": dict(num_heads=2, head_dim=32, budget=9, block=4)}, "model.indexer.budget=9"),
        ({"hyper_connection": dict(streams=0, rank=2)}, "model.hyper_connection.streams=0"),
    ],
)
def test_sizes_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CFG, **change)


def test_unknown_model_lists_the_choices():
    with pytest.raises(ValueError, match=r"model='qwen2' is unknown.*qwen3_235b_a22b"):
        config.get("qwen2")


@pytest.mark.parametrize("layers", [(), (-1,)])
def test_an_ngram_layer_that_is_none(layers):
    with pytest.raises(ValueError, match=r"model\.ngram\.layers=.*counted from 0"):
        dataclasses.replace(config.get("qwen3_8_flash_next").ngram, layers=layers)
