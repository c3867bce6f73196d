"""config.json of every family: published values, what transformers leaves out, what is refused."""

import dataclasses

import pytest

from tests.models.hugging_face.small_checkpoints import CASES, DENSE, config_json
from trace_jax.models import config
from trace_jax.models.architecture import ATTENTION, DELTA_NET
from trace_jax.models.hugging_face import config as hf_config

COMMON = dict(
    hidden_act="silu", rms_norm_eps=1e-6, attention_bias=False, attention_dropout=0.0,
    initializer_range=0.02, tie_word_embeddings=False, router_aux_loss_coef=0.001,
)  # fmt: skip
SPARSE = dict(decoder_sparse_step=1, mlp_only_layers=[])
GDN = dict(
    linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, full_attention_interval=4,
)  # fmt: skip
MROPE = dict(
    rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25,
    mrope_section=[11, 11, 10], mrope_interleaved=True,
)  # fmt: skip
QWEN3_30B = COMMON | SPARSE | dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=151936,
    num_hidden_layers=48, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, rope_theta=1000000.0, rope_scaling=None, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, intermediate_size=6144, norm_topk_prob=True,
    use_sliding_window=False, sliding_window=None, max_window_layers=48,
)  # fmt: skip
NEXT_80B = COMMON | SPARSE | GDN | dict(
    model_type="qwen3_next", vocab_size=151936, num_hidden_layers=48, hidden_size=2048,
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, rope_theta=10000000,
    partial_rotary_factor=0.25, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, intermediate_size=5120, norm_topk_prob=True,
)  # fmt: skip
QWEN3_5_35B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152},
    "text_config": COMMON | GDN | dict(
        model_type="qwen3_5_moe_text", vocab_size=248320, num_hidden_layers=40, hidden_size=2048,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, rope_parameters=MROPE,
        attn_output_gate=True, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, mamba_ssm_dtype="float32", eos_token_id=248044,
    ),
}  # fmt: skip
QWEN3_8_2_4T = QWEN3_5_35B["text_config"] | dict(
    architectures=["Qwen3_5MoeForCausalLM"], num_hidden_layers=92, hidden_size=8192,
    num_attention_heads=64, num_key_value_heads=4, num_experts=512, num_experts_per_tok=10,
    moe_intermediate_size=2048, shared_expert_intermediate_size=2048, linear_num_value_heads=128,
    output_gate_type="swish",
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
)  # fmt: skip
FLASH_NEXT = {
    "model_type": "qwen4_exp",
    "text_config": QWEN3_5_35B["text_config"] | dict(
        model_type="qwen4_exp_text", num_hidden_layers=48, hidden_size=2560,
        num_attention_heads=24, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=640,
        shared_expert_intermediate_size=640, linear_num_value_heads=48, output_gate_type="sigmoid",
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12,
        hc_count=4, hc_lowrank=320, indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128,
        indexer_budget=2048, indexer_compress_ratio=4, ple_layer_ids=[2], ple_embed_dim=2560,
        ple_conv_kernel_size=4, ngram_size=3, heads_per_ngram=8, ngram_vocab_size_base=20000000,
        make_ngram_vocab_size_divisible_by=128, split_ngram_parts=128, seed=1234,
    ),
}  # fmt: skip
PUBLISHED = {
    "qwen3_30b_a3b": QWEN3_30B,
    "qwen3_next_80b_a3b": NEXT_80B,
    "qwen3_5_35b_a3b": QWEN3_5_35B,
    "qwen3_8_2_4t_a95b": QWEN3_8_2_4T,
    "qwen3_8_flash_next": FLASH_NEXT,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_model_of_that_name(name):
    assert hf_config.read(PUBLISHED[name]) == config.get(name)


@pytest.mark.parametrize("name", config.MODELS)
def test_every_model_can_be_written(name):
    cfg = config.get(name)
    assert hf_config.read(hf_config.write(cfg, hf_config.family_for(cfg))) == cfg


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_tests_models_can_be_written(case):
    assert hf_config.read(config_json(case)) == case.cfg


def without(*names, **changed):
    """Qwen3-Next's config without some keys, and with others."""
    return {k: v for k, v in NEXT_80B.items() if k not in names} | changed


def moe(*names, **changed):
    return {k: v for k, v in QWEN3_30B.items() if k not in names} | changed


def flash(**changed):
    text = FLASH_NEXT["text_config"]
    return {"model_type": "qwen4_exp", "text_config": text | changed}


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        (without("partial_rotary_factor"), "rotary_fraction", 0.25),
        (without("norm_topk_prob"), "norm_topk_prob", True),
        (without(norm_topk_prob=False), "norm_topk_prob", False),
        (without("full_attention_interval"), "layer_pattern", (*(DELTA_NET,) * 3, ATTENTION)),
        (moe("norm_topk_prob"), "norm_topk_prob", False),
        (moe("num_experts", num_local_experts=64), "num_experts", 64),
        (moe("head_dim"), "head_dim", 64),
        (moe("rope_theta"), "rope_theta", 10_000),
        (moe(rope_parameters={"rope_theta": 5.0, "rope_type": "default"}), "rope_theta", 5.0),
        (moe(tie_word_embeddings=True), "tie_embeddings", True),
        (QWEN3_8_2_4T | {"norm_topk_prob": False}, "norm_topk_prob", True),
        (flash(rope_parameters={"rope_theta": 1e7}, indexer_head_dim=256), "rotary_fraction", 1.0),
        (flash(ple_layer_ids=[]), "ngram", None),
        (flash(layer_types=["linear_attention", "indexed_attention"] * 24), "layer_pattern",
         (DELTA_NET, ATTENTION)),
        (without(num_hidden_layers=3), "layer_pattern", (DELTA_NET,)),
        (without(num_hidden_layers=2, layer_types=["full_attention"] * 2), "delta_net", None),
        (without(num_hidden_layers=3,
                 layer_types=["full_attention", "linear_attention", "linear_attention"]),
         "layer_pattern", (ATTENTION, DELTA_NET, DELTA_NET)),
    ],
)  # fmt: skip
def test_defaults_and_spellings(given, field, value):
    assert getattr(hf_config.read(given), field) == value


def test_details_of_flash_next():
    cfg = hf_config.read(flash(eos_token_id=[7, 8], ple_embed_dim=None, output_gate_type=None))
    assert (cfg.ngram.eos_id, cfg.ngram.embed_dim, cfg.delta_net.gate) == (7, 2560, "silu")
    assert cfg.ngram.layers == (1,)  # [2] on disk


def test_the_tie_that_counts_is_the_outer_one():
    assert hf_config.read(FLASH_NEXT | {"tie_word_embeddings": True}).tie_embeddings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (moe(hidden_act="gelu"), "hidden_act='gelu' is not supported; this model has 'silu'"),
        (moe(attention_bias=True), "attention_bias=True"),
        (moe(mlp_only_layers=[0]), r"mlp_only_layers=\[0\]"),
        (moe(decoder_sparse_step=2), "decoder_sparse_step=2"),
        (moe(use_sliding_window=True), "use_sliding_window=True"),
        (moe(layer_types=["sliding_attention"] * 48), "layer_types=.*is not supported"),
        (moe(layer_types=["linear_attention"] * 48), "layer_types=.*is not supported"),
        (moe(rope_scaling={"type": "yarn", "factor": 4.0}), "rope_type='yarn'"),
        (moe(rope_parameters={"rope_type": "llama3", "rope_theta": 1.0}), "rope_type='llama3'"),
        (moe(rope_parameters={"full_attention": {"rope_theta": 1.0}}), "one for all layers"),
        (moe("num_experts"), "num_experts is missing"),
        (moe("hidden_size"), "hidden_size is missing"),
        (without(layer_types=["full_attention"]), "has 1 entries, num_hidden_layers=48"),
        (without(output_gate_type="sigmoid"), "output_gate_type='sigmoid'"),
        (flash(attn_output_gate=False), "attn_output_gate=False"),
        (flash(indexer_kv_heads=2), "indexer_kv_heads=2"),
        (flash(hc_lowrank=None), "hc_lowrank is missing"),
        (dict(model_type="gpt2"), "model_type='gpt2'; known: qwen3_moe, qwen3_next, "),
    ],
)  # fmt: skip
def test_what_is_refused(given, message):
    with pytest.raises(ValueError, match=rf"config.json: .*{message}"):
        hf_config.read(given)


def test_a_model_that_no_family_holds():
    odd = dataclasses.replace(DENSE, zero_centered_norms=True)
    with pytest.raises(ValueError, match=r"qwen3 cannot have zero_centered_norms=True"):
        hf_config.family_for(odd)
    with pytest.raises(ValueError, match=r"qwen3_moe cannot have .*attention_gate=True"):
        hf_config.write(config.get("qwen3_5_35b_a3b"), "qwen3_moe")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "config.json holds a list, not an object"),
        ({"text_config": [1]}, "text_config and rope_parameters must be objects"),
        ({"rope_parameters": "default"}, "text_config and rope_parameters must be objects"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is no whole number above 0"),
        ({"hidden_size": "64"}, "hidden_size='64' is no whole number above 0"),
    ],
)
def test_a_malformed_config_is_named(config, message):
    if isinstance(config, dict):
        config = config_json(CASES["qwen3_moe"]) | config
    with pytest.raises(ValueError, match=message):
        hf_config.read(config)


def test_only_hybrids_rotate_a_part_of_each_head():
    """transformers reads the key for no other family."""
    plain = config_json(CASES["qwen3_moe"])
    assert hf_config.read(plain | {"partial_rotary_factor": 0.5}).rotary_fraction == 1
    half = dataclasses.replace(CASES["qwen3_moe"].cfg, rotary_fraction=0.5)
    with pytest.raises(ValueError, match=r"rotary_fraction"):
        hf_config.write(half, "qwen3_moe")
