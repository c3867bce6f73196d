"""Grade-school maths from a JSONL file: GSM8K rows, or verl-style rows with a ground truth.

    python -m experiments.rl --config=configs/gsm8k.py:PATH/train.jsonl --workdir=runs/gsm8k

The rows come from https://github.com/openai/grade-school-math (MIT); none are kept here. Answers
are judged by math-verify (pip install -r requirements-tasks.txt). With the byte tokenizer a prompt
takes up to 991 tokens: a check of the pipeline on a laptop, a task for larger models on an
accelerator.
"""

from ml_collections import ConfigDict

from configs import tiny_cpu


def get_config(path: str | None = None) -> ConfigDict:
    """tiny_cpu on the rows of the file at `path`; some questions are held out for evaluation."""
    config = tiny_cpu.get_config()
    config.task.name = "jsonl"
    config.task.path = path or ""
    config.task.reward = "math"
    config.task.train_size = 6000
    config.task.test_size = 256
    config.warmup_steps = 0  # its worked solutions would not fit max_new_tokens
    config.evaluation.prompts = 64
    config.rollout.prompts = 4
    config.rollout.prompt_length = 1024
    config.rollout.max_new_tokens = 128
    return config
