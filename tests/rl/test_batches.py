import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.rl import batches, rewards
from trace_jax.rl.examples import Example
from trace_jax.rl.tasks import Task
from trace_jax.rl.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
PAD, EOS = TOKENIZER.pad_id, TOKENIZER.eos_id
TASK = Task(
    name="toy",
    train=(Example("1+1=", "2"), Example("9+1=", "10"), Example("é=", "e", "see e")),
    test=(Example("2+2=", "4"), Example("44+1=", "45")),
    reward=rewards.exact_match,
)
PINNED = [525, 343, 778, 364]


@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 5))
def test_every_epoch_deals_each_example_once(size, batch, seed):
    dealt = np.concatenate([batches.indices(size, step, batch, seed) for step in range(2 * size)])
    for epoch in range(len(dealt) // size):
        assert sorted(dealt[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_step_alone_gives_its_batch():
    assert batches.indices(1000, step=7, batch=4, seed=3).tolist() == PINNED
    assert batches.indices(1000, step=7, batch=4, seed=4).tolist() != PINNED
    first, second = (batches.indices(1000, epoch, 1000, 3).tolist() for epoch in (0, 1))
    assert first != second


def test_prompts_are_padded_on_the_right():
    tokens_BP, length_B, examples = batches.prompt_batch(
        TASK, TOKENIZER, step=0, batch=3, prompt_length=6, seed=0
    )
    assert tokens_BP.shape == (3, 6)
    assert tokens_BP.dtype == length_B.dtype == np.int32
    assert set(examples) == set(TASK.train)
    for tokens_P, length, example in zip(tokens_BP, length_B, examples, strict=True):
        assert tokens_P.tolist() == [*example.prompt.encode(), *[PAD] * (6 - length)]
        assert length == len(example.prompt.encode())


def test_a_prompt_of_just_the_length_fits_and_a_longer_one_is_refused():
    assert batches.check_prompts(TASK, TOKENIZER, prompt_length=5) == 5
    batches.test_batch(TASK, TOKENIZER, 2, prompt_length=5)
    message = "rollout.prompt_length=4, but a prompt of the task has 5 tokens; fix: raise .* to 5"
    with pytest.raises(ValueError, match=message):
        batches.check_prompts(TASK, TOKENIZER, prompt_length=4)  # the long one is in the test set
    with pytest.raises(ValueError, match=message):
        batches.test_batch(TASK, TOKENIZER, 2, prompt_length=4)
    with pytest.raises(ValueError, match=r"rollout.prompt_length=2, .* tokens"):
        batches.prompt_batch(TASK, TOKENIZER, 0, 3, prompt_length=2, seed=0)


def test_the_test_batch_is_the_first_examples():
    tokens_BP, length_B, examples = batches.test_batch(TASK, TOKENIZER, 1, prompt_length=5)
    assert tokens_BP.tolist() == [[*b"2+2=", PAD]]
    assert length_B.tolist() == [4]
    assert examples == TASK.test[:1]
    with pytest.raises(
        ValueError, match=r"3 prompts, but the task has 2; fix: raise task.test_size"
    ):
        batches.test_batch(TASK, TOKENIZER, 3, prompt_length=5)


def test_supervision_is_on_the_solution_and_its_end():
    tokens_BT, mask_BT = batches.supervised_batch(
        TASK, TOKENIZER, step=0, batch=3, length=9, seed=0
    )
    assert (tokens_BT.dtype, mask_BT.dtype) == (np.int32, np.float32)
    rows = [(t.tolist(), m.tolist()) for t, m in zip(tokens_BT, mask_BT, strict=True)]
    assert ([*b"1+1=2", EOS, PAD, PAD, PAD], [0, 0, 0, 0, 1, 1, 0, 0, 0]) in rows
    assert ([*b"9+1=10", EOS, PAD, PAD], [0, 0, 0, 0, 1, 1, 1, 0, 0]) in rows
    assert ([*"é=see e".encode(), EOS], [0, 0, 0, 1, 1, 1, 1, 1, 1]) in rows


def test_a_long_solution_is_refused_before_the_warm_up():
    assert batches.check_solutions(TASK, TOKENIZER, length=9) == 9
    message = r"rollout.prompt_length \+ rollout.max_new_tokens = 8, .* 9 tokens; fix"
    with pytest.raises(ValueError, match=message):
        batches.check_solutions(TASK, TOKENIZER, length=8)
    with pytest.raises(ValueError, match=message):
        batches.supervised_batch(TASK, TOKENIZER, 0, 3, length=8, seed=0)


def test_answers_need_room_for_their_end():
    assert batches.check_answers(TASK, TOKENIZER, max_new_tokens=3) == 3
    message = (
        "rollout.max_new_tokens=2, but 2 of 5 answers .*up to 3 tokens.* raise .* to 3 or more"
    )
    with pytest.raises(ValueError, match=message):
        batches.check_answers(TASK, TOKENIZER, max_new_tokens=2)
