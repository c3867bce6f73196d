"""config.json of a Hugging Face checkpoint, as a ModelConfig and back.

Keys and defaults: the configuration classes of transformers 5.24, and published files where they
differ (qwen.md section 1). A value that would change the numbers and is not modelled raises.
"""

import dataclasses
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

# Our fields and the keys that name the same numbers, for `read` and `write` alike.
SIZES = dict(
    vocab_size="vocab_size", hidden_size="hidden_size", num_layers="num_hidden_layers",
    num_heads="num_attention_heads", num_kv_heads="num_key_value_heads", head_dim="head_dim",
    rms_norm_eps="rms_norm_eps", initializer_range="initializer_range",
)  # fmt: skip
DENSE = dict(intermediate_size="intermediate_size")
EXPERTS = dict(
    num_experts="num_experts", num_experts_per_token="num_experts_per_tok",
    moe_intermediate_size="moe_intermediate_size",
)  # fmt: skip
SHARED_EXPERT = dict(shared_expert_size="shared_expert_intermediate_size")
PART_KEYS = {
    DeltaNetConfig: dict(
        num_key_heads="linear_num_key_heads", num_value_heads="linear_num_value_heads",
        key_head_dim="linear_key_head_dim", value_head_dim="linear_value_head_dim",
        conv_size="linear_conv_kernel_dim",
    ),
    HyperConnectionConfig: dict(streams="hc_count", rank="hc_lowrank"),
    IndexerConfig: dict(
        num_heads="indexer_n_heads", head_dim="indexer_head_dim", budget="indexer_budget",
        block="indexer_compress_ratio",
    ),
    NgramConfig: dict(
        size="ngram_size", heads_per_ngram="heads_per_ngram", embed_dim="ple_embed_dim",
        vocab_size_base="ngram_vocab_size_base", divisible_by="make_ngram_vocab_size_divisible_by",
        seed="seed", conv_size="ple_conv_kernel_size",
    ),
}  # fmt: skip
# What stands for a key that is not there; others must be.
DEFAULTS = dict(
    rms_norm_eps=1e-6, initializer_range=0.02, linear_conv_kernel_dim=4, ngram_size=3,
    heads_per_ngram=8, ngram_vocab_size_base=20_000_000, make_ngram_vocab_size_divisible_by=128,
    seed=1234, ple_conv_kernel_size=4,
)  # fmt: skip

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
    if not isinstance(config, Mapping):
        raise ValueError(f"config.json holds a {type(config).__name__}, not an object")
    kind = config.get("model_type")
    kind = NESTED.get(kind, kind)
    if kind not in FAMILIES:
        known = ", ".join([*FAMILIES, *NESTED])
        raise ValueError(f"config.json: model_type={config.get('model_type')!r}; known: {known}")
    return kind


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model.

    Raises ValueError where it is no object.
    """
    text = config.get("text_config") or config
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(text, Mapping) or not isinstance(text.get(key) or {}, Mapping):
            raise ValueError("config.json: text_config and rope_parameters must be objects")
    return text


def read(config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a config.json.

    Raises ValueError naming the key: one that is missing, or a value that is not modelled.
    """
    family = FAMILIES[family_of(config)]
    text = text_config(config)
    _check_values(text)
    heads, hidden = _whole(text, "num_attention_heads"), _whole(text, "hidden_size")
    theta, fraction = _rope(text, family)
    mixers = _mixers(text, family)
    sizes = _fields(text, SIZES, num_key_value_heads=heads, head_dim=hidden // heads)
    sizes |= dict(
        rope_theta=theta,
        rotary_fraction=fraction,
        qk_norm=family.qk_norm,
        attention_gate=family.hybrid,
        zero_centered_norms=family.hybrid,
        tie_embeddings=_get(config, "tie_word_embeddings", False),
        layer_pattern=_pattern(mixers),
    )
    if family.moe:
        experts = _get(text, "num_experts", text.get("num_local_experts"))
        sizes |= _fields({**text, "num_experts": experts}, EXPERTS)
        keep = family.norm_topk_prob
        sizes["norm_topk_prob"] = True if keep is None else _get(text, "norm_topk_prob", keep)
    else:
        sizes |= _fields(text, DENSE)
    if family.hybrid:
        sizes |= _fields(text, SHARED_EXPERT)
    if DELTA_NET in mixers:
        sizes["delta_net"] = _part(text, DeltaNetConfig, gate=_gate(text, family))
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
        **_keys(cfg, SIZES),
        hidden_act="silu",
        tie_word_embeddings=cfg.tie_embeddings,
        attention_bias=False,
        attention_dropout=0.0,
        max_position_embeddings=262144 if kind.hybrid else 40960,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=cfg.rope_theta,
        ),
    )
    if kind.hybrid:
        made["rope_parameters"]["partial_rotary_factor"] = cfg.rotary_fraction
    if kind.moe:
        made |= _keys(cfg, EXPERTS) | {"norm_topk_prob": cfg.norm_topk_prob}
    else:
        made |= _keys(cfg, DENSE)
    if kind.hybrid:
        made |= _keys(cfg, SHARED_EXPERT)
        made["layer_types"] = [types[mixer] for mixer in cfg.mixers]
    for part in (cfg.delta_net, cfg.hyper_connection, cfg.indexer, cfg.ngram):
        if part:
            made |= _keys(part, PART_KEYS[type(part)])
    if cfg.delta_net:
        made["output_gate_type"] = cfg.delta_net.gate
    if cfg.indexer:
        made["indexer_kv_heads"] = 1
    if n := cfg.ngram:
        ids = [layer + 1 for layer in n.layers]
        made |= dict(ple_layer_ids=ids, split_ngram_parts=1, eos_token_id=n.eos_id)
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


def _whole(text, key):
    value = _need(text, key)
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: {key}={value!r} is no whole number above 0")
    return value


def _get(config, key, default):
    return default if config.get(key) is None else config[key]


def _fields(text, keys, **defaults):
    """Our fields of a config.json; `defaults` by its keys, beside DEFAULTS."""
    defaults = DEFAULTS | defaults
    return {
        field: _get(text, key, defaults[key]) if key in defaults else _need(text, key)
        for field, key in keys.items()
    }


def _keys(section, keys):
    """What `_fields` reads."""
    return {key: getattr(section, field) for field, key in keys.items()}


def _part(text, kind, **others):
    return kind(**_fields(text, PART_KEYS[kind]), **others)


def _check_values(text):
    for key, values in ONLY.items():
        if text.get(key) is not None and text[key] not in values:
            raise ValueError(
                f"config.json: {key}={text[key]!r} is not supported; this model has {values[0]!r}"
            )


def _rope(text, family):
    """(theta, fraction of each head that rotates, which only hybrids read)."""
    rope = (text.get("rope_parameters") or {}) | (text.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"config.json: rope_type={kind!r} of {dict(rope)} is not supported; only 'default' is, "
            "and one for all layers"
        )
    fraction = family.rotary_fraction
    if family.hybrid:
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
    found = {"hyper_connection": _part(text, HyperConnectionConfig)}
    if text.get("indexer_n_heads") is not None:
        found["indexer"] = _part(text, IndexerConfig)
    if text.get("ple_layer_ids"):
        eos = _need(text, "eos_token_id")
        found["ngram"] = _part(
            {**text, "ple_embed_dim": _get(text, "ple_embed_dim", text["hidden_size"])},
            NgramConfig,
            layers=tuple(sorted({layer - 1 for layer in text["ple_layer_ids"]})),  # from 1 on disk
            eos_id=eos[0] if isinstance(eos, list) else eos,
        )
    return found
