"""Model sizes by name, and what follows from them: parameter counts, the tiny version.

Values: released config files, as listed in reference/qwen.md table 1.2.
"""

import dataclasses
import functools

from trace_jax.models.architecture import (
    ATTENTION,
    DELTA_NET,
    DeltaNetConfig,
    HyperConnectionConfig,
    IndexerConfig,
    ModelConfig,
    NgramConfig,
    layers_with,
)


def _qwen3(**sizes) -> ModelConfig:
    """Qwen3-MoE: attention in every layer, no shared expert."""
    same = dict(vocab_size=151936, num_kv_heads=4, head_dim=128, num_experts=128)
    return ModelConfig(**same, num_experts_per_token=8, rope_theta=1e6, **sizes)


def _hybrid(*, key_heads: int = 16, value_heads: int, gate: str = "silu", **sizes) -> ModelConfig:
    """Qwen3-Next and later: three DeltaNet layers, then one of gated attention; a shared expert."""
    same = dict(
        head_dim=256,
        rope_theta=1e7,
        rotary_fraction=0.25,
        attention_gate=True,
        zero_centered_norms=True,
        layer_pattern=(DELTA_NET, DELTA_NET, DELTA_NET, ATTENTION),
        delta_net=DeltaNetConfig(key_heads, value_heads, 128, 128, gate=gate),
        vocab_size=248320,
    )
    return ModelConfig(**(same | sizes))


QWEN3_5_35B = _hybrid(
    hidden_size=2048, num_layers=40, num_heads=16, num_kv_heads=2, num_experts=256,
    num_experts_per_token=8, moe_intermediate_size=512, shared_expert_size=512, value_heads=32,
)  # fmt: skip

MODELS = {
    "qwen3_30b_a3b": _qwen3(
        hidden_size=2048, num_layers=48, num_heads=32, moe_intermediate_size=768
    ),
    "qwen3_235b_a22b": _qwen3(
        hidden_size=4096, num_layers=94, num_heads=64, moe_intermediate_size=1536
    ),
    "qwen3_next_80b_a3b": _hybrid(
        vocab_size=151936, hidden_size=2048, num_layers=48, num_heads=16, num_kv_heads=2,
        num_experts=512, num_experts_per_token=10, moe_intermediate_size=512,
        shared_expert_size=512, value_heads=32,
    ),
    "qwen3_5_35b_a3b": QWEN3_5_35B,
    "qwen3_5_122b_a10b": _hybrid(
        hidden_size=3072, num_layers=48, num_heads=32, num_kv_heads=2, num_experts=256,
        num_experts_per_token=8, moe_intermediate_size=1024, shared_expert_size=1024,
        value_heads=64,
    ),
    "qwen3_5_397b_a17b": _hybrid(
        hidden_size=4096, num_layers=60, num_heads=32, num_kv_heads=2, num_experts=512,
        num_experts_per_token=10, moe_intermediate_size=1024, shared_expert_size=1024,
        value_heads=64,
    ),
    "qwen3_6_35b_a3b": QWEN3_5_35B,  # the same architecture
    "qwen3_8_2_4t_a95b": _hybrid(
        hidden_size=8192, num_layers=92, num_heads=64, num_kv_heads=4, num_experts=512,
        num_experts_per_token=10, moe_intermediate_size=2048, shared_expert_size=2048,
        value_heads=128,
    ),
    "qwen3_8_flash_next": _hybrid(
        hidden_size=2560, num_layers=48, num_heads=24, num_kv_heads=2, num_experts=512,
        num_experts_per_token=10, moe_intermediate_size=640, shared_expert_size=640,
        value_heads=48, gate="sigmoid",
        hyper_connection=HyperConnectionConfig(streams=4, rank=320),
        indexer=IndexerConfig(num_heads=4, head_dim=128, budget=2048, block=4),
        ngram=NgramConfig(
            layers=(1,), size=3, heads_per_ngram=8, embed_dim=2560, vocab_size_base=20_000_000,
            divisible_by=128, seed=1234, eos_id=248044,
        ),
    ),
}  # fmt: skip


def get(name: str) -> ModelConfig:
    """The named model's true sizes. Raises ValueError listing the choices."""
    if name not in MODELS:
        raise ValueError(f"model={name!r} is unknown: choose one of {sorted(MODELS)}")
    return MODELS[name]


def tiny(cfg: ModelConfig) -> ModelConfig:
    """cfg with every structural feature kept at toy size: one round of its layer pattern or more.

    Kept: layer pattern, head group ratios, partial rotary, gates, shared expert, top-k below E,
    sparse selection; and value heads of DeltaNet are made wider than key heads. Every width is a
    multiple of 32, so that either FP4 format fits.
    """
    parts = {}
    if cfg.delta_net:
        ratio = cfg.delta_net.num_value_heads // cfg.delta_net.num_key_heads
        parts["delta_net"] = dataclasses.replace(
            cfg.delta_net, num_key_heads=2, num_value_heads=2 * ratio, key_head_dim=16,
            value_head_dim=32,
        )  # fmt: skip
    if cfg.hyper_connection:
        parts["hyper_connection"] = dataclasses.replace(cfg.hyper_connection, rank=16)
    if cfg.indexer:
        parts["indexer"] = dataclasses.replace(
            cfg.indexer, num_heads=2, head_dim=32, budget=2 * cfg.indexer.block
        )
    if cfg.ngram:
        parts["ngram"] = dataclasses.replace(
            cfg.ngram, heads_per_ngram=2, embed_dim=64, vocab_size_base=97, divisible_by=8,
            eos_id=257,
        )  # fmt: skip
    return dataclasses.replace(
        cfg,
        vocab_size=272,
        hidden_size=64,
        num_layers=min(cfg.num_layers, 4),
        num_heads=2 * cfg.num_heads // cfg.num_kv_heads,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_token=min(cfg.num_experts_per_token, 2),
        moe_intermediate_size=32,
        shared_expert_size=32 if cfg.shared_expert_size else 0,
        rope_theta=1e4,
        **parts,
    )


def total_parameters(cfg: ModelConfig) -> int:
    """Parameters of the text backbone, embedding and head included, without n-gram table or MTP.

    `ngram_table_parameters` are apart: the table is looked up, sixteen rows a token.
    """
    return _parameters(cfg, cfg.num_experts)


def active_parameters(cfg: ModelConfig) -> int:
    """Parameters that one token passes through, embedding and head included."""
    return _parameters(cfg, cfg.num_experts_per_token)


def ngram_table_parameters(cfg: ModelConfig) -> int:
    """Parameters of the n-gram tables of all layers that have one."""
    if not cfg.ngram:
        return 0
    rows = sum(ngram_rows(cfg.ngram, ordinal) for ordinal in range(len(cfg.ngram.layers)))
    return rows * cfg.ngram.row_width


def ngram_rows(ngram: NgramConfig, ordinal: int = 0) -> int:
    """Rows of the table of the `ordinal`-th layer that has one: its heads' primes, padded.

    Raises ValueError beyond what int32 can address.
    """
    rows = -(-sum(ngram_primes(ngram, ordinal)) // ngram.divisible_by) * ngram.divisible_by
    if rows >= 2**31:
        raise ValueError(
            f"model.ngram.vocab_size_base={ngram.vocab_size_base} makes a table of {rows} rows; "
            "row numbers are int32: lower it below 2**31 over the number of heads"
        )
    return rows


@functools.cache
def ngram_primes(ngram: NgramConfig, ordinal: int = 0) -> tuple[int, ...]:
    """The table size of each head: consecutive primes, from vocab_size_base on over all layers."""
    found, candidate = [], ngram.vocab_size_base
    while len(found) < (ordinal + 1) * ngram.heads:
        if candidate > 1 and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            found.append(candidate)
        candidate += 1
    return tuple(found[-ngram.heads :])


def _parameters(cfg: ModelConfig, experts: int) -> int:
    D, C = cfg.hidden_size, cfg.head_dim
    attention = D * C * ((3 if cfg.attention_gate else 2) * cfg.num_heads + 2 * cfg.num_kv_heads)
    attention += 2 * C if cfg.qk_norm else 0
    if cfg.indexer:
        attention += cfg.indexer.head_dim * (D * (cfg.indexer.num_heads + 1) + 2)
    blocks = 3 * D * (experts * cfg.moe_intermediate_size + cfg.intermediate_size)
    blocks += cfg.num_experts * D  # router
    blocks += (3 * cfg.shared_expert_size + 1) * D if cfg.shared_expert_size else 0
    norms, last_norm = 2 * D, D
    if h := cfg.hyper_connection:
        wide = h.streams * D
        mixer = wide * (1 + 2 * h.rank)
        norms, last_norm = 2 * (mixer + h.streams * wide), mixer
    total = cfg.num_layers * (blocks + norms) + len(layers_with(cfg, ATTENTION)) * attention
    if d := cfg.delta_net:
        one = D * (d.conv_width + 2 * d.value_width + 2 * d.num_value_heads)
        one += d.conv_width * d.conv_size + 2 * d.num_value_heads + d.value_head_dim
        total += len(layers_with(cfg, DELTA_NET)) * one
    if n := cfg.ngram:
        wide = cfg.hyper_connection.streams * D
        one = n.embed_dim * (wide + D) + wide * (3 + n.conv_size)
        total += len(n.layers) * one
    embeddings = 1 if cfg.tie_embeddings else 2
    return total + embeddings * cfg.vocab_size * D + last_norm
