"""Coverage against a case by hand, the trees that a rollout holds, and the configs' own counts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from trace_jax.analysis.coverage import Part, coverage, table
from trace_jax.guidance.policy import NOTHING, resolve
from trace_jax.models import architecture, cache, config, decoder, packing

SMALL = config.ModelConfig(
    vocab_size=10,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=16,
)
TINY = config.tiny(config.get("qwen3_30b_a3b"))
RULES = {
    "nothing": [],
    "experts and k": [("experts/*", "nvfp4"), ("attention/k", "nvfp4")],
    "all nvfp4": [("*", "nvfp4")],
    "all mxfp4": [("*", "mxfp4")],
    "w4a8": [("*", "mxfp4_w4a8")],
    "mixed": [("attention/out", "mxfp4_floor"), ("*/in", "nvfp4"), ("*/v", "mxfp4")],
}
POLICIES = {name: resolve(rules, architecture.sites(TINY)) for name, rules in RULES.items()}
EXPERTS_AND_K = POLICIES["experts and k"]


def tree_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_every_part_of_a_small_model_by_hand():
    found = coverage(EXPERTS_AND_K, SMALL, kv_length=8)
    assert found.parts == (
        # 2 layers of q [32, 32], k and v [16, 32]
        Part("attention/in", "bf16", 4096, 8192, 8192),
        # 2 layers, 2 heads of 16, 8 positions, a multiply-add as 2
        Part("attention/k", "nvfp4", 0, 0, 1024),
        Part("attention/v", "bf16", 0, 0, 1024),
        Part("attention/out", "bf16", 2048, 4096, 4096),
        # 2 layers of 4 experts [32, 32]: codes, a scale for 16, outer scales; 2 of 4 experts work
        Part("experts/in", "nvfp4", 8192, 4096 + 512 + 2 * 4 * 4, 8192),
        Part("experts/mid", "nvfp4", 4096, 2048 + 256 + 2 * 4 * 4, 4096),
        Part("head/in", "bf16", 320, 640, 640),
        # 2 layers of 2 norms of 32 and 2 of 16, and the final one
        Part("norms", "float32", 224, 896, 0),
        Part("router", "float32", 256, 1024, 512),
        Part("embedding", "bf16", 320, 640, 0),
    )
    assert found.kv_bytes_per_token == 2 * ((8 + 1 + 4) + 32)
    assert found.kv_bytes_per_token_bf16 == 2 * (32 + 32)
    assert found.weight_bytes_bf16 == 2 * 19552
    assert found.total("weight_bytes") == 22464
    assert found.share("parameters") == 12288 / 19552
    assert found.share("weight_bytes") == (4640 + 2336) / 22464
    assert found.share("flops") == (1024 + 8192 + 4096) / 27776


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_bytes_are_those_of_the_packed_tree(policy):
    cfg = dataclasses.replace(TINY, num_layers=2)

    def in_rollout(key):
        return packing.pack(decoder.init(cfg, key), policy, jnp.bfloat16)

    packed = jax.eval_shape(in_rollout, jax.random.key(0))
    layers = packed["layers_0"]["0"]
    attention, experts = layers["attention"], layers["experts"]
    found = coverage(policy, cfg, kv_length=1)
    of = {part.name: part.weight_bytes for part in found.parts}
    nbytes = lambda *leaves: sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves)
    )
    assert found.total("weight_bytes") == nbytes(packed)
    assert of["attention/in"] == nbytes(attention["q"], attention["k"], attention["v"])
    assert of["attention/out"] == nbytes(attention["o"])
    assert of["experts/in"] == nbytes(experts["gate_up"])
    assert of["experts/mid"] == nbytes(experts["down"])
    assert of["router"] == nbytes(experts["router"])
    assert of["embedding"] == nbytes(packed["embed"])
    assert of["head/in"] == nbytes(packed["head"])


def test_bytes_are_those_of_arrays_in_memory():
    packed = packing.pack(decoder.init(SMALL, jax.random.key(0)), EXPERTS_AND_K, jnp.bfloat16)
    found = coverage(EXPERTS_AND_K, SMALL, kv_length=1)
    assert found.total("weight_bytes") == tree_bytes(packed)
    kv = cache.empty(SMALL, EXPERTS_AND_K, batch=3, length=5, dtype=jnp.bfloat16)
    assert found.kv_bytes_per_token == tree_bytes(kv) / 15


@pytest.mark.parametrize("name", config.MODELS)
def test_counts_agree_with_those_of_the_config(name):
    cfg = config.get(name)
    everything = resolve([("*", "nvfp4")], architecture.sites(cfg))
    found = coverage(everything, cfg, kv_length=1000)
    of = {part.name: part for part in found.parts}
    table = config.ngram_table_parameters(cfg)
    assert found.total("parameters") == config.total_parameters(cfg) + table
    attention = of["attention/k"].flops + of["attention/v"].flops
    layers = len(architecture.layers_with(cfg, "attention"))
    assert attention == 4 * layers * cfg.num_heads * cfg.head_dim * 1000
    multiplied = config.active_parameters(cfg) - of["embedding"].parameters - of["norms"].parameters
    state = 0
    if delta := cfg.delta_net:
        layers = cfg.num_layers - layers
        state = layers * 6 * delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
        multiplied -= layers * 2 * delta.num_value_heads  # decay and step offsets, added
    assert found.total("flops") - attention - state == 2 * multiplied


def test_nothing_quantized_is_bf16_but_for_router_and_norms():
    found = coverage(NOTHING, TINY, kv_length=64)
    of = {part.name: part for part in found.parts}
    assert {of[site].fmt for site in architecture.sites(TINY)} == {"bf16"}
    assert [found.share(q) for q in ("parameters", "weight_bytes", "flops")] == [0, 0, 0]
    float32 = of["router"].parameters + of["norms"].parameters
    assert found.total("weight_bytes") == found.weight_bytes_bf16 + 2 * float32
    assert found.kv_bytes_per_token == found.kv_bytes_per_token_bf16


def test_w4a8_saves_the_bytes_of_fp4_and_none_of_its_flops():
    cfg = dataclasses.replace(SMALL, head_dim=32, moe_intermediate_size=32)
    rules = {
        name: resolve([("*", name)], architecture.sites(cfg)) for name in ("mxfp4", "mxfp4_w4a8")
    }
    w4a4, w4a8 = (coverage(policy, cfg, kv_length=8) for policy in rules.values())
    for quantity in ("parameters", "weight_bytes"):
        assert w4a8.share(quantity) == w4a4.share(quantity) > 0.3
    attention = sum(
        part.flops for part in w4a8.parts if part.name in ("attention/k", "attention/v")
    )
    assert w4a8.share("flops") == attention / w4a8.total("flops")
    assert w4a8.kv_bytes_per_token == w4a4.kv_bytes_per_token
    assert [part.formats for part in w4a8.parts[:3]] == ["mxfp4 x mxfp8", "mxfp4", "mxfp4"]


def test_only_attention_grows_with_the_positions_attended():
    short, long = (coverage(EXPERTS_AND_K, TINY, length) for length in (1, 65))
    for a, b in zip(short.parts, long.parts, strict=True):
        grows = 65 if a.name in ("attention/k", "attention/v") else 1
        assert b == dataclasses.replace(a, flops=grows * a.flops)


def test_table_is_aligned_and_short():
    assert table(coverage(EXPERTS_AND_K, SMALL, kv_length=8)) == "\n".join(
        [
            "site           format   parameters  weight bytes  FLOPs a token",
            "attention/in   bf16           4.1k         8.19k          8.19k",
            "attention/k    nvfp4             0             0          1.02k",
            "attention/v    bf16              0             0          1.02k",
            "attention/out  bf16          2.05k          4.1k           4.1k",
            "experts/in     nvfp4         8.19k         4.64k          8.19k",
            "experts/mid    nvfp4          4.1k         2.34k           4.1k",
            "head/in        bf16            320           640            640",
            "norms          float32         224           896              0",
            "router         float32         256         1.02k            512",
            "embedding      bf16            320           640              0",
            "all                          19.6k         22.5k          27.8k",
            "share in FP4                 62.8%         31.1%          47.9%",
            "weights: 22,464 B, 0.574 of BF16",
            "KV cache: 90 B a token, 0.703 of BF16",
            "FLOPs: those of decode, 8 positions attended",
        ]
    )


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="kv_length=0: must be at least 1"):
        coverage(NOTHING, TINY, kv_length=0)
    odd = dataclasses.replace(TINY, moe_intermediate_size=24)
    with pytest.raises(ValueError, match="is 24, not a multiple of the block 16; pad it to 32"):
        coverage(EXPERTS_AND_K, odd, kv_length=1)
