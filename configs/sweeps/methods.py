"""Every method over seeds on the tiny task: the comparison of docs/results.md, section 1.

    python -m experiments.sweep --config=configs/sweeps/methods.py --workdir=runs/methods
    python -m experiments.sweep --config=configs/sweeps/methods.py:4 --workdir=runs/methods_4

The argument is the number of updates a rollout. With four there are half as many rollouts, and so
twice the updates.
"""

from ml_collections import ConfigDict

from configs.sweeps import base

METHODS = ("bf16", "fp4_rollout", "qat", "quads", "trace", "trace_full", "trace_syndrome")


def get_config(updates: str = "1") -> ConfigDict:
    """Seven methods, five seeds, `updates` updates a rollout."""
    fixed = {} if updates == "1" else dict(steps=75, rl=dict(updates_per_rollout=int(updates)))
    return base.sweep(axes=dict(method=METHODS, seed=(0, 1, 2, 3, 4)), fixed=fixed)
