"""What every sweep says: which runs, and how they are launched (trace_jax/sweeps/)."""

from ml_collections import ConfigDict


def sweep(axes: dict, fixed: dict | None = None, config: str = "configs/tiny_cpu.py") -> ConfigDict:
    """A sweep over the product of `axes`, whose names are keys of `config`."""
    return ConfigDict(
        dict(
            config=config,  # FILE.py[:argument] that every run starts from; an axis may vary it
            fixed=fixed or {},  # overrides that all runs share
            axes=axes,  # key of the config: tuple of values; a key inside a section is nested
            launcher="local",  # local: this machine; slurm: through submitit; none: only report
            jobs=1,  # runs at a time on this machine
            gpus_per_run=0,  # GPUs that each of them sees; 0: all that there are
            # submitit's parameters for Slurm, timeout in minutes.
            slurm=dict(timeout_min=240, slurm_partition="", slurm_array_parallelism=16),
        )
    )
