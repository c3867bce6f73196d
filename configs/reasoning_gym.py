"""A task of reasoning-gym in place of the built-in one (pip install -r requirements-tasks.txt).

    python -m experiments.rl --config=configs/reasoning_gym.py:chain_sum --workdir=runs/chain_sum

Any dataset with one right answer works; give `task.options` what its create_dataset takes. From
scratch, sums of two one-digit numbers are the easiest start.
"""

from ml_collections import ConfigDict

from configs import tiny_cpu


def get_config(dataset: str | None = None) -> ConfigDict:
    """tiny_cpu on reasoning-gym's `dataset` (default: chain_sum with two or three terms)."""
    config = tiny_cpu.get_config()
    options = dict(min_terms=2, max_terms=3, min_digits=1, max_digits=2) if not dataset else {}
    config.task.name = "reasoning_gym"
    config.task.dataset = dataset or "chain_sum"
    config.task.options = ConfigDict(options)
    config.task.train_size = 4000
    config.task.test_size = 256
    config.evaluation.prompts = 256
    config.rollout.prompt_length = 72
    config.rollout.max_new_tokens = 8
    return config
