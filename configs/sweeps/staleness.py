"""Rollouts that run ahead of training by 0 to 3 versions, under three methods.

python -m experiments.sweep --config=configs/sweeps/staleness.py --workdir=runs/staleness
"""

from ml_collections import ConfigDict

from configs.sweeps import base


def get_config() -> ConfigDict:
    """Three methods, four stalenesses, three seeds."""
    return base.sweep(
        axes=dict(
            method=("fp4_rollout", "qat", "trace"),
            rl=dict(staleness=(0, 1, 2, 3)),
            seed=(0, 1, 2),
        )
    )
