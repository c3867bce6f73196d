"""Held-out evaluation: as deployed (FP4, no rollout to follow), in BF16, and guided.

Letters: B prompts, T tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.guidance.policy import Policy
from trace_jax.models import packing
from trace_jax.parallel import mesh as meshes
from trace_jax.rl import batches
from trace_jax.rl.settings import Settings
from trace_jax.rl.tasks import Task
from trace_jax.rl.tokenizer import Tokenizer
from trace_jax.rollout import log_probs
from trace_jax.rollout.sampler import Rollout, Sampler


def greedy(settings: Settings, task: Task, params: dict, sampler: Sampler) -> tuple[Rollout, float]:
    """Greedy completions of the held-out prompts, and the share that is right."""
    count = settings.evaluation.prompts
    tokens_BP, length_B, examples = batches.test_batch(
        task, settings.tokenizer, count, settings.rollout.prompt_length
    )
    packed = packing.pack_jit(params, sampler.policy, settings.dtype)
    tokens, length, ids = on_mesh((tokens_BP, length_B, np.arange(count)))
    rollout = sampler(packed, tokens, length, jax.random.key(0), ids, 0.0)
    texts = completions(rollout, settings.tokenizer)
    rewards = [task.reward(text, example) for text, example in zip(texts, examples, strict=True)]
    return rollout, float(np.mean(rewards))


def accuracy(settings: Settings, task: Task, params: dict, policy: Policy) -> float:
    """Share of held-out prompts answered right by greedy decoding under a policy."""
    return greedy(settings, task, params, settings.evaluator(policy))[1]


def guided_agreement(settings: Settings, task: Task, params: dict) -> dict[str, float]:
    """How the training forward sees the greedy FP4 completions when it follows their record.

    Returns the share of completion tokens that are its own first choice too, and the mean and
    largest difference of log-probs (nats) from the FP4 decode, at temperature 1.
    """
    whole = dataclasses.replace(settings.sampler(), top_p=1.0, top_k=0)  # as the trainer scores
    rollout, _ = greedy(settings, task, params, whole)
    trainer = settings.trainer()
    out = jax.jit(trainer.forward)(params, rollout, trainer.noise(jax.random.key(0)))
    mask_BT, tokens_BT = rollout.mask_BT, rollout.tokens_BT
    first_BT = jnp.pad(jnp.argmax(out.logits[:, :-1], axis=-1), ((0, 0), (1, 0)))
    logp_BT, _ = log_probs.next_token_log_probs(out.logits, tokens_BT, 1.0)
    gap_BT = jnp.abs(logp_BT - rollout.logp_BT) * mask_BT
    return {
        "guided/same_choice": float(jnp.sum((first_BT == tokens_BT) * mask_BT) / jnp.sum(mask_BT)),
        "guided/logp_abs_mean": float(jnp.sum(gap_BT) / jnp.sum(mask_BT)),
        "guided/logp_abs_max": float(jnp.max(gap_BT)),
    }


def on_mesh(arrays: tuple) -> tuple:
    """Arrays with sequences on their first axis, spread over the mesh in context."""
    return jax.device_put(arrays, meshes.batch_sharding(jax.sharding.get_mesh()))


def completions(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """The text that each sequence added to its prompt, without stop token."""
    tokens_BT, start_B, end_B = jax.device_get(
        (rollout.tokens_BT, rollout.prompt_length_B, rollout.length_B)
    )
    return [
        tokenizer.decode(row[start:end])
        for row, start, end in zip(tokens_BT, start_B, end_B, strict=True)
    ]
