"""Eight layers, the paper's FP4 sites and more, to measure the mismatch without learning.

python -m experiments.mismatch --config=configs/mismatch.py --workdir=runs/mismatch
"""

from ml_collections import ConfigDict

from configs import tiny_cpu


def get_config(model: str | None = None) -> ConfigDict:
    """tiny_cpu with eight layers and eight experts."""
    config = tiny_cpu.get_config(model)
    config.warmup_steps = 250
    if model is None:
        config.model.num_layers = 8
        config.model.num_experts = 8
    return config
