"""Batches of prompts and of worked answers, as a pure function of the seed and the step.

Nothing is iterated: the position in the data is the step number, and a resumed run sees the batches
that it would have seen. Letters: B sequences, P prompt length, T tokens.
"""

from collections.abc import Sequence

import numpy as np

from trace_jax.rl.examples import Example
from trace_jax.rl.tasks import Task
from trace_jax.rl.tokenizer import Tokenizer


def indices(size: int, step: int, batch: int, seed: int) -> np.ndarray:
    """Which of `size` examples make up the batch of this step, int64 [B].

    Examples are dealt from one shuffled deck an epoch, so none repeats within an epoch; a batch may
    take the end of one deck and the start of the next.
    """
    epoch_B, place_B = np.divmod(np.arange(step * batch, (step + 1) * batch), size)
    decks = {e: np.random.default_rng([seed, e]).permutation(size) for e in np.unique(epoch_B)}
    return np.array([decks[e][i] for e, i in zip(epoch_B, place_B, strict=True)], np.int64)


def prompt_batch(
    task: Task, tokenizer: Tokenizer, step: int, batch: int, prompt_length: int, seed: int
) -> tuple[np.ndarray, np.ndarray, tuple[Example, ...]]:
    """(tokens_BP int32 right-padded, length_B int32, examples): the training prompts of this step.

    Raises:
      ValueError: a prompt has more than `prompt_length` tokens.
    """
    examples = tuple(task.train[i] for i in indices(len(task.train), step, batch, seed))
    return *_prompts(examples, tokenizer, prompt_length), examples


def test_batch(
    task: Task, tokenizer: Tokenizer, size: int, prompt_length: int
) -> tuple[np.ndarray, np.ndarray, tuple[Example, ...]]:
    """(tokens_BP int32 right-padded, length_B int32, examples): the first `size` test prompts.

    Raises:
      ValueError: the test set is smaller than `size`, or a prompt longer than `prompt_length`.
    """
    if size > len(task.test):
        raise ValueError(
            f"evaluation on {size} prompts, but the task has {len(task.test)}; "
            f"fix: raise task.test_size to {size}, or evaluate on fewer"
        )
    examples = task.test[:size]
    return *_prompts(examples, tokenizer, prompt_length), examples


def supervised_batch(
    task: Task, tokenizer: Tokenizer, step: int, batch: int, length: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens_BT int32, mask_BT float32): prompts followed by their solutions, right-padded.

    mask_BT is 1 on the tokens of the solution and its end-of-sequence token, 0 elsewhere.

    Raises:
      ValueError: an example has more than `length` tokens.
    """
    tokens_BT = np.full((batch, length), tokenizer.pad_id, np.int32)
    mask_BT = np.zeros((batch, length), np.float32)
    for b, i in enumerate(indices(len(task.train), step, batch, seed)):
        prompt, solution = _solved(task.train[i], tokenizer)
        _check_solution(len(prompt) + len(solution), length)
        end = len(prompt) + len(solution)
        tokens_BT[b, :end] = prompt + solution
        mask_BT[b, len(prompt) : end] = 1
    return tokens_BT, mask_BT


def check_prompts(task: Task, tokenizer: Tokenizer, prompt_length: int) -> int:
    """The tokens of the longest prompt, train and test. To be called before any long work.

    Raises:
      ValueError: it has more than `prompt_length` tokens.
    """
    longest = max(len(prompt_ids(e, tokenizer)) for e in task.train + task.test)
    _check_prompt(longest, prompt_length)
    return longest


def check_answers(task: Task, tokenizer: Tokenizer, max_new_tokens: int) -> int:
    """The tokens of the longest answer with its end of sequence, train and test.

    Raises:
      ValueError: it has more than `max_new_tokens` tokens, so that question could earn no reward.
    """
    lengths = [len(tokenizer.encode(e.answer)) + 1 for e in task.train + task.test]
    if too_long := sum(n > max_new_tokens for n in lengths):
        raise ValueError(
            f"rollout.max_new_tokens={max_new_tokens}, but {too_long} of {len(lengths)} answers "
            f"with their end-of-sequence token are longer (up to {max(lengths)} tokens); "
            f"fix: raise rollout.max_new_tokens to {max(lengths)} or more, or choose a shorter task"
        )
    return max(lengths)


def check_solutions(task: Task, tokenizer: Tokenizer, length: int) -> int:
    """The tokens of the longest training example: prompt, solution and end of sequence.

    Raises:
      ValueError: it has more than `length` tokens, so a warm-up would come upon it sooner or later.
    """
    longest = max(sum(map(len, _solved(e, tokenizer))) for e in task.train)
    _check_solution(longest, length)
    return longest


def prompt_ids(example: Example, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a question, put as the tokenizer's chat template puts it."""
    return tokenizer.chat([{"role": "user", "content": example.prompt}])


def _prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, prompt_length: int
) -> tuple[np.ndarray, np.ndarray]:
    tokens_BP = np.full((len(examples), prompt_length), tokenizer.pad_id, np.int32)
    length_B = np.zeros(len(examples), np.int32)
    for b, example in enumerate(examples):
        prompt = prompt_ids(example, tokenizer)
        _check_prompt(len(prompt), prompt_length)
        tokens_BP[b, : len(prompt)] = prompt
        length_B[b] = len(prompt)
    return tokens_BP, length_B


def _solved(example: Example, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(prompt, solution with its end-of-sequence token)."""
    return prompt_ids(example, tokenizer), [*tokenizer.encode(example.solution), tokenizer.eos_id]


def _check_prompt(tokens: int, prompt_length: int) -> None:
    if tokens > prompt_length:
        raise ValueError(
            f"rollout.prompt_length={prompt_length}, but a prompt of the task has {tokens} tokens; "
            f"fix: raise rollout.prompt_length to {tokens} or more, or choose a shorter task"
        )


def _check_solution(tokens: int, length: int) -> None:
    if tokens > length:
        raise ValueError(
            f"rollout.prompt_length + rollout.max_new_tokens = {length}, but prompt and solution "
            f"of a training example have {tokens} tokens; fix: raise either so that the sum is "
            f"{tokens} or more, or set warmup_steps=0"
        )
