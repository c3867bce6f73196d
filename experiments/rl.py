"""The main job: FP4 reinforcement learning with rollout-guided training. Resumes from workdir.

python -m experiments.rl --config=configs/tiny_cpu.py --workdir=runs/tiny [--config.method=qat]
"""

from experiments import command_line
from trace_jax.rl import run


def main(config, workdir: str) -> None:
    """Trains, then prints the summary."""
    summary = run.run(config, workdir)
    for name, value in summary.items():
        print(f"{name:32s} {value}")


if __name__ == "__main__":
    command_line.run(main, workdir="runs/tiny")
