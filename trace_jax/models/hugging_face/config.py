"""config.json of a Hugging Face checkpoint, as a ModelConfig and back.

Keys and defaults: the configuration classes of transformers 5.24, and published files where they
differ (qwen.md section 1). A value that would change the numbers and is not modelled raises.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from trace_jax.models.architecture import (
    ATTENTION,
    DELTA_NET,
    DeltaNetConfig,
    HyperConnectionConfig,
    IndexerConfig,
    ModelConfig,
    NgramConfig,
)

LAYER_TYPES = {
    "linear_attention": DELTA_NET,
    "full_attention": ATTENTION,
    "indexed_attention": ATTENTION,  # the name transformers gives to sparse attention
    "qwen_sparse_attention": ATTENTION,  # and vLLM
}
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


@dataclasses.dataclass(frozen=True)
class Family:
    """What a model_type settles beyond its config's values."""

    architecture: str  # the class that saves it, for text alone
    moe: bool = True
    hybrid: bool = False  # DeltaNet layers, gated attention, shared expert, zero-centred norms
    streams: bool = False  # hyper-connections
    qk_norm: bool = True
    norm_topk_prob: bool | None = None  # where the config has no such key; None: always
    rotary_fraction: float = 1.0  # where the config has no such key


FAMILIES = {
    "qwen3_moe": Family("Qwen3MoeForCausalLM", norm_topk_prob=False),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", hybrid=True, norm_topk_prob=True, rotary_fraction=0.25
    ),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", hybrid=True, rotary_fraction=0.25),
    "qwen4_exp_text": Family("Qwen4ExpForCausalLM", hybrid=True, streams=True, norm_topk_prob=True),
    "qwen3": Family("Qwen3ForCausalLM", moe=False),
    "llama": Family("LlamaForCausalLM", moe=False, qk_norm=False),
}
PREFERRED = ("qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text", "qwen3_moe", "qwen3", "llama")
NESTED = {"qwen3_5_moe": "qwen3_5_moe_text", "qwen4_exp": "qwen4_exp_text"}

# Keys that would change the numbers: the values that do not.
ONLY = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "use_sliding_window": (False,),
    "attn_output_gate": (True,),
    "indexer_kv_heads": (1,),
}


def family_of(config: Mapping[str, Any]) -> str:
    """The key of FAMILIES of a config.json, nested or flat. Raises ValueError for another."""
    kind = config.get("model_type")
    kind = NESTED.get(kind, kind)
    if kind not in FAMILIES:
        known = ", ".join([*FAMILIES, *NESTED])
        raise ValueError(f"config.json: model_type={config.get('model_type')!r}; known: {known}")
    return kind


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model."""
    return config.get("text_config") or config


def read(config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a config.json.

    Raises ValueError naming the key: one that is missing, or a value that is not modelled.
    """
    family = FAMILIES[family_of(config)]
    text = text_config(config)
    _check_values(text)
    need = functools.partial(_need, text)
    heads, hidden = need("num_attention_heads"), need("hidden_size")
    theta, fraction = _rope(text, family.rotary_fraction)
    mixers = _mixers(text, family)
    sizes = dict(
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        num_layers=need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_get(text, "num_key_value_heads", heads),
        head_dim=_get(text, "head_dim", hidden // heads),
        rope_theta=theta,
        rotary_fraction=fraction,
        rms_norm_eps=_get(text, "rms_norm_eps", 1e-6),
        initializer_range=_get(text, "initializer_range", 0.02),
        qk_norm=family.qk_norm,
        attention_gate=family.hybrid,
        zero_centered_norms=family.hybrid,
        tie_embeddings=_get(config, "tie_word_embeddings", False),
        layer_pattern=_pattern(mixers),
    )
    if family.moe:
        experts = _get(text, "num_experts", _get(text, "num_local_experts", None))
        keep = family.norm_topk_prob
        sizes |= dict(
            num_experts=need("num_experts") if experts is None else experts,
            num_experts_per_token=need("num_experts_per_tok"),
            moe_intermediate_size=need("moe_intermediate_size"),
            norm_topk_prob=True if keep is None else _get(text, "norm_topk_prob", keep),
        )
    else:
        sizes["intermediate_size"] = need("intermediate_size")
    if family.hybrid:
        sizes["shared_expert_size"] = need("shared_expert_intermediate_size")
    if DELTA_NET in mixers:
        sizes["delta_net"] = DeltaNetConfig(
            need("linear_num_key_heads"),
            need("linear_num_value_heads"),
            need("linear_key_head_dim"),
            need("linear_value_head_dim"),
            _get(text, "linear_conv_kernel_dim", 4),
            _gate(text, family),
        )
    if family.streams:
        sizes |= _streams(text)
    return ModelConfig(**sizes)


def write(cfg: ModelConfig, family: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of a model, flat: what `read` makes cfg of.

    Raises ValueError, naming the field, where a model of this family cannot be so.
    """
    kind = FAMILIES[family]
    attention = "indexed_attention" if kind.streams else "full_attention"
    types = {ATTENTION: attention, DELTA_NET: "linear_attention"}
    made = dict(
        architectures=[kind.architecture],
        model_type=family,
        dtype=dtype,
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        num_key_value_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        hidden_act="silu",
        initializer_range=cfg.initializer_range,
        rms_norm_eps=cfg.rms_norm_eps,
        tie_word_embeddings=cfg.tie_embeddings,
        attention_bias=False,
        attention_dropout=0.0,
        max_position_embeddings=262144 if kind.hybrid else 40960,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=cfg.rope_theta,
            partial_rotary_factor=cfg.rotary_fraction,
        ),
    )
    if kind.moe:
        made |= dict(
            num_experts=cfg.num_experts,
            num_experts_per_tok=cfg.num_experts_per_token,
            moe_intermediate_size=cfg.moe_intermediate_size,
            norm_topk_prob=cfg.norm_topk_prob,
        )
    else:
        made["intermediate_size"] = cfg.intermediate_size
    if kind.hybrid:
        made["shared_expert_intermediate_size"] = cfg.shared_expert_size
        made["layer_types"] = [types[mixer] for mixer in cfg.mixers]
    if d := cfg.delta_net:
        made |= dict(
            linear_num_key_heads=d.num_key_heads,
            linear_num_value_heads=d.num_value_heads,
            linear_key_head_dim=d.key_head_dim,
            linear_value_head_dim=d.value_head_dim,
            linear_conv_kernel_dim=d.conv_size,
            output_gate_type=d.gate,
        )
    if h := cfg.hyper_connection:
        made |= dict(hc_count=h.streams, hc_lowrank=h.rank)
    if i := cfg.indexer:
        made |= dict(
            indexer_n_heads=i.num_heads,
            indexer_kv_heads=1,
            indexer_head_dim=i.head_dim,
            indexer_budget=i.budget,
            indexer_compress_ratio=i.block,
        )
    if n := cfg.ngram:
        made |= dict(
            ple_layer_ids=[layer + 1 for layer in n.layers],
            ple_embed_dim=n.embed_dim,
            ple_conv_kernel_size=n.conv_size,
            ngram_size=n.size,
            heads_per_ngram=n.heads_per_ngram,
            ngram_vocab_size_base=n.vocab_size_base,
            make_ngram_vocab_size_divisible_by=n.divisible_by,
            split_ngram_parts=1,
            seed=n.seed,
            eos_token_id=n.eos_id,
        )
    check_same(cfg, read(made), family)
    return made


def family_for(cfg: ModelConfig) -> str:
    """The first family of PREFERRED that can hold the model.

    Raises ValueError where none can, naming for each family the fields that differ.
    """
    problems = []
    for family in PREFERRED:
        try:
            write(cfg, family)
            return family
        except ValueError as error:
            problems.append(f"{error}")
    raise ValueError("no Hugging Face model type can hold this model:\n  " + "\n  ".join(problems))


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A copy of a config.json that names another dtype wherever it names one."""
    made = dict(config)
    if "text_config" in made:
        made["text_config"] = with_dtype(made["text_config"], dtype)
    return made | dict.fromkeys({"dtype", "torch_dtype"} & made.keys(), dtype)


def check_same(cfg: ModelConfig, other: ModelConfig, what: str) -> None:
    """Raises ValueError, naming the fields, where `what` is of another model than cfg."""
    names = [field.name for field in dataclasses.fields(cfg)]
    names[names.index("layer_pattern")] = "mixers"  # two patterns may name the same layers
    differ = [
        f"{name}={getattr(cfg, name)!r}"
        for name in names
        if getattr(cfg, name) != getattr(other, name)
    ]
    if differ:
        raise ValueError(f"{what} cannot have {', '.join(differ)}")


def _need(text, key):
    if text.get(key) is None:
        raise ValueError(f"config.json: {key} is missing")
    return text[key]


def _get(config, key, default):
    return default if config.get(key) is None else config[key]


def _check_values(text):
    for key, values in ONLY.items():
        if text.get(key) is not None and text[key] not in values:
            raise ValueError(
                f"config.json: {key}={text[key]!r} is not supported; this model has {values[0]!r}"
            )


def _rope(text, fraction):
    """(theta, fraction of each head that rotates)."""
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"config.json: rope_type={kind!r} of {dict(rope)} is not supported; only 'default' is, "
            "and one for all layers"
        )
    fraction = rope.get("partial_rotary_factor", _get(text, "partial_rotary_factor", fraction))
    return rope.get("rope_theta", _get(text, "rope_theta", 10_000.0)), fraction


def _mixers(text, family):
    """The mixer of each layer."""
    layers = _need(text, "num_hidden_layers")
    interval = _get(text, "full_attention_interval", 4)
    if text.get("layer_types"):
        types = text["layer_types"]
    elif family.hybrid:
        linear = ["linear_attention"] * (interval - 1)
        types = ([*linear, "full_attention"] * layers)[:layers]
    else:
        types = ["full_attention"] * layers
    unknown = sorted(set(types) - set(LAYER_TYPES))
    mixers = [LAYER_TYPES[kind] for kind in types if kind in LAYER_TYPES]
    if unknown or (DELTA_NET in mixers and not family.hybrid):
        raise ValueError(f"config.json: layer_types={types} is not supported in this model type")
    if len(mixers) != layers:
        raise ValueError(
            f"config.json: layer_types has {len(mixers)} entries, num_hidden_layers={layers}"
        )
    return tuple(mixers)


def _pattern(mixers):
    """The shortest pattern that repeats to these mixers."""
    for size in range(1, len(mixers) + 1):
        if all(mixer == mixers[layer % size] for layer, mixer in enumerate(mixers)):
            return mixers[:size]
    return mixers


def _gate(text, family):
    """Activation of the DeltaNet output gate; only one family can choose it."""
    gate = _get(text, "output_gate_type", "silu")
    if gate not in GATES or (GATES[gate] == "sigmoid" and not family.streams):
        raise ValueError(f"config.json: output_gate_type={gate!r} is not supported here")
    return GATES[gate]


def _streams(text):
    """The parts that only Flash-Next has."""
    found = {
        "hyper_connection": HyperConnectionConfig(
            _need(text, "hc_count"), _need(text, "hc_lowrank")
        )
    }
    if text.get("indexer_n_heads") is not None:
        found["indexer"] = IndexerConfig(
            text["indexer_n_heads"],
            _need(text, "indexer_head_dim"),
            _need(text, "indexer_budget"),
            _need(text, "indexer_compress_ratio"),
        )
    if text.get("ple_layer_ids"):
        eos = _need(text, "eos_token_id")
        found["ngram"] = NgramConfig(
            layers=tuple(sorted({layer - 1 for layer in text["ple_layer_ids"]})),  # from 1 on disk
            size=_get(text, "ngram_size", 3),
            heads_per_ngram=_get(text, "heads_per_ngram", 8),
            embed_dim=_get(text, "ple_embed_dim", text["hidden_size"]),
            vocab_size_base=_get(text, "ngram_vocab_size_base", 20_000_000),
            divisible_by=_get(text, "make_ngram_vocab_size_divisible_by", 128),
            seed=_get(text, "seed", 1234),
            eos_id=eos[0] if isinstance(eos, list) else eos,
            conv_size=_get(text, "ple_conv_kernel_size", 4),
        )
    return found
