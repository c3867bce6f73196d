"""Rows as wide as a head of the paper's models, to measure what the syndrome restores there.

    python -m experiments.mismatch --config=configs/mismatch_wide.py --workdir=runs/wide --methods

Heads of 256 as in Qwen3.5; the model width is 512, its experts' too. A code over a row is the
stronger the longer the row (guidance/syndrome.py).
"""

from ml_collections import ConfigDict

from configs import tiny_cpu


def get_config(model: str | None = None) -> ConfigDict:
    """tiny_cpu with four wide layers, and fewer sequences."""
    config = tiny_cpu.get_config(model)
    config.rollout.prompts = 8
    config.warmup.learning_rate = 1e-3
    if model is None:
        config.model.update(
            num_layers=4, hidden_size=512, moe_intermediate_size=256, num_experts=8, head_dim=256,
            num_heads=2, num_kv_heads=1, initializer_range=0.04,
        )  # fmt: skip
    return config
