"""What the rollout keeps, over the share of the layers that it keeps it of.

python -m experiments.sweep --config=configs/sweeps/encodings.py --workdir=runs/encodings
"""

from ml_collections import ConfigDict

from configs.sweeps import base


def get_config() -> ConfigDict:
    """Four encodings, all layers and the latter half, three seeds."""
    return base.sweep(
        axes=dict(
            guidance=dict(
                encoding=("codes", "low2", "low1", "syndrome"), layers=("all", "latter_half")
            ),
            seed=(0, 1, 2),
        ),
        fixed=dict(method="trace"),
    )
