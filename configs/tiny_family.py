"""The tiny version of any Qwen family on the task of tiny_cpu.py: its layers, gates and streams.

    python -m experiments.rl --config=configs/tiny_family.py:qwen3_8_flash_next --workdir=runs/flash
    python -m experiments.mismatch --config=configs/tiny_family.py:qwen3_6_35b_a3b --workdir=runs/a

Names: models/config.py. As in tiny_cpu.py, every site is in FP4 but the head's input and the
recurrent state, and all layers are guided.
"""

import dataclasses

from ml_collections import ConfigDict

from configs import tiny_cpu
from trace_jax.models import config as models


def get_config(name: str = "qwen3_5_35b_a3b") -> ConfigDict:
    """configs/tiny_cpu.py with the structure of a named model."""
    config = tiny_cpu.get_config()
    tiny = dataclasses.replace(models.tiny(models.get(name)), initializer_range=0.1)
    with config.unlocked():
        config.model = ConfigDict(dataclasses.asdict(tiny))
    config.guidance.sites = ("*/in", "*/out", "*/k", "*/v")  # the rest follows from these
    return config
