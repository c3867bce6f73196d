"""Methods over Qwen-style families at their tiny sizes.

python -m experiments.sweep --config=configs/sweeps/sizes.py --workdir=runs/sizes
"""

from ml_collections import ConfigDict

from configs.sweeps import base

SIZES = (
    "configs/tiny_cpu.py",
    "configs/tiny_family.py:qwen3_30b_a3b",
    "configs/tiny_family.py:qwen3_next_80b_a3b",
    "configs/tiny_family.py:qwen3_5_35b_a3b",
    "configs/tiny_family.py:qwen3_8_flash_next",
)


def get_config() -> ConfigDict:
    """Three methods, five models, two seeds."""
    return base.sweep(axes=dict(method=("fp4_rollout", "qat", "trace"), config=SIZES, seed=(0, 1)))
