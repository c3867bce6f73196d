"""A sweep that takes minutes: three methods, two seeds, 20 steps each.

python -m experiments.sweep --config=configs/sweeps/trial.py --workdir=runs/trial
"""

from ml_collections import ConfigDict

from configs.sweeps import base


def get_config() -> ConfigDict:
    """Six short runs on the tiny task."""
    return base.sweep(
        axes=dict(method=("fp4_rollout", "qat", "trace"), seed=(0, 1)),
        fixed=dict(steps=20, warmup_steps=250, evaluation=dict(every=10)),
    )
