"""Model sizes by name, and what follows from them: parameter counts, the tiny version.

Values: released config files, as listed in reference/qwen.md table 1.2.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Qwen3-MoE decoder. Raises ValueError when they do not fit together."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    norm_topk_prob: bool = True
    initializer_range: float = 0.02

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"model.{field.name}={value!r}: must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}; query heads share KV heads evenly"
            )
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"model.num_experts_per_token={self.num_experts_per_token} exceeds "
                f"model.num_experts={self.num_experts}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim}: rotary embedding needs an even size")


MODELS = {
    "qwen3_30b_a3b": ModelConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_token=8,
        moe_intermediate_size=768,
    ),
    "qwen3_235b_a22b": ModelConfig(
        vocab_size=151936,
        hidden_size=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_token=8,
        moe_intermediate_size=1536,
    ),
}


def get(name: str) -> ModelConfig:
    """The named model's true sizes. Raises ValueError listing the choices."""
    if name not in MODELS:
        raise ValueError(f"model={name!r} is unknown: choose one of {sorted(MODELS)}")
    return MODELS[name]


def tiny(cfg: ModelConfig) -> ModelConfig:
    """cfg with every structural feature kept (head groups, top-k below E) at toy size."""
    return dataclasses.replace(
        cfg,
        vocab_size=272,
        hidden_size=64,
        num_layers=min(cfg.num_layers, 4),
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_token=min(cfg.num_experts_per_token, 2),
        moe_intermediate_size=64,
        rope_theta=1e4,
    )


def total_parameters(cfg: ModelConfig) -> int:
    """Parameters of the text backbone, embedding and head included."""
    return _parameters(cfg, cfg.num_experts)


def active_parameters(cfg: ModelConfig) -> int:
    """Parameters that one token passes through, embedding and head included."""
    return _parameters(cfg, cfg.num_experts_per_token)


def _parameters(cfg: ModelConfig, experts: int) -> int:
    D, C = cfg.hidden_size, cfg.head_dim
    attention = D * C * (2 * cfg.num_heads + 2 * cfg.num_kv_heads) + 2 * C
    moe = cfg.num_experts * D + experts * 3 * D * cfg.moe_intermediate_size
    return cfg.num_layers * (attention + moe + 2 * D) + 2 * cfg.vocab_size * D + D
