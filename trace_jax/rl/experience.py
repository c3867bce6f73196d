"""What is learned from: a batch of prompts, its rollout, and what its rewards come to.

Rollout number `index` depends on the configuration, the weights and the index alone, not on what
ran before. Letters: B sequences, P prompt length, Q prompts, G completions a prompt.
"""

from typing import NamedTuple

import jax
import numpy as np

from trace_jax.rl import advantages, batches
from trace_jax.rl.evaluation import completions, on_mesh
from trace_jax.rl.examples import Example
from trace_jax.rl.settings import Settings
from trace_jax.rl.tasks import Task
from trace_jax.rollout.sampler import Rollout, Sampler
from trace_jax.training.step import TrainBatch


def prompts(
    settings: Settings, task: Task, index: int
) -> tuple[np.ndarray, np.ndarray, tuple[Example, ...]]:
    """(tokens_QP, length_Q, examples) of rollout number `index`, one a group."""
    s = settings.rollout
    return batches.prompt_batch(
        task, settings.tokenizer, index, s.prompts, s.prompt_length, settings.seed
    )


def sample(
    settings: Settings,
    task: Task,
    sampler: Sampler,
    packed: dict,
    index: int,
    key: jax.Array,
    version: int = 0,
) -> Rollout:
    """Rollout number `index`, each prompt with all its completions side by side."""
    s = settings.rollout
    tokens_QP, length_Q, _ = prompts(settings, task, index)
    tokens_BP, length_B = (np.repeat(a, s.completions, axis=0) for a in (tokens_QP, length_Q))
    inputs = on_mesh((tokens_BP, length_B, np.arange(s.batch)))
    key = jax.random.fold_in(key, index)
    return sampler(packed, inputs[0], inputs[1], key, inputs[2], s.temperature, version)


class Scored(NamedTuple):
    """A rollout as a batch to learn from, and what was rewarded."""

    batch: TrainBatch
    reward_B: np.ndarray  # float32
    samples: list[dict]  # one a completion: prompt, answer, completion, reward


def score(
    settings: Settings, task: Task, rollout: Rollout, index: int, noise_key: jax.Array
) -> Scored:
    """Rollout number `index` with its rewards and advantages; waits for it."""
    _, _, examples = prompts(settings, task, index)
    groups = settings.rollout.completions
    texts = completions(rollout, settings.tokenizer)
    asked = [example for example in examples for _ in range(groups)]
    rewards = [task.reward(text, example) for text, example in zip(texts, asked, strict=True)]
    reward_B = np.array(rewards, np.float32)
    samples = [
        {"prompt": e.prompt, "answer": e.answer, "completion": text, "reward": float(reward)}
        for e, text, reward in zip(asked, texts, reward_B, strict=True)
    ]
    advantage_QG, keep_QG = advantages.group_normalised(
        reward_B.reshape(-1, groups), settings.rl.drop_zero_variance
    )
    batch = TrainBatch(rollout, advantage_QG.reshape(-1), keep_QG.reshape(-1), noise_key)
    return Scored(batch, reward_B, samples)
