"""Methods over Qwen-style families at their tiny sizes, and over depth and width of the default.

python -m experiments.sweep --config=configs/sweeps/sizes.py --workdir=runs/sizes
"""

from ml_collections import ConfigDict

from configs.sweeps import base

SIZES = ("configs/tiny_cpu.py",) + tuple(
    f"configs/tiny_family.py:{name}"
    for name in ("qwen3_30b_a3b", "qwen3_5_35b_a3b", "qwen3_next_80b_a3b", "qwen3_8_flash_next")
)


def get_config() -> ConfigDict:
    """Three methods, five models, two seeds."""
    return base.sweep(axes=dict(method=("fp4_rollout", "qat", "trace"), config=SIZES, seed=(0, 1)))
