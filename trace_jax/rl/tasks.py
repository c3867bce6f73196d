"""Verifiable tasks: questions with known answers, split by question, and a reward.

Whether a question is for training or for testing is decided by a hash of its text alone, so no
seed, train size or version of a generator moves a test question into training. A split by the
generator's seed would: of 512 "test" sums of two-digit numbers, 364 had been trained on.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from trace_jax.rl import rewards
from trace_jax.rl.examples import Example, distinct, question_hash, read_jsonl

HELD_OUT_ONE_IN = 8  # share of all questions that is kept for testing
PATIENCE = 2000  # repeats in a row after which a generator counts as exhausted

REQUIRED = ("name", "train_size", "test_size")
DEFAULTS = {
    "digits": 10,  # running_sum: length of the question; digit_sum: how many are added
    "dataset": "",  # reasoning_gym: name of the data set, such as 'chain_sum'
    "options": {},  # reasoning_gym: its further settings
    "path": "",  # jsonl: file of training questions
    "test_path": "",  # jsonl: file of test questions; '' holds some of `path` out
    "reward": "exact",  # 'exact', 'math' or 'number'
}


@dataclasses.dataclass(frozen=True)
class Task:
    """Training and test examples, no question in both, and the reward of (completion, example)."""

    name: str
    train: tuple[Example, ...]
    test: tuple[Example, ...]
    reward: Callable[[str, Example], float]


def load(config: Mapping, seed: int) -> Task:
    """The task that `config` (a dict or ConfigDict) describes; the same for the same seed.

    `config` holds REQUIRED and any of DEFAULTS; fields of the other tasks may be there, unused. The
    seed chooses which questions a generator draws; files are read from the top.

    Raises:
      ValueError: a field is unknown, missing or of a wrong value, a file is malformed, or there are
        fewer distinct questions than asked for.
      FileNotFoundError: a file does not exist.
      ImportError: the task or reward needs a package that is not installed.
    """
    sources = {
        "running_sum": _running_sum,
        "digit_sum": _digit_sum,
        "reasoning_gym": _reasoning_gym,
        "jsonl": _jsonl,
    }
    fields = _checked(config)
    name = fields["name"]
    if name not in sources:
        raise ValueError(f"task.name={name!r} is unknown; fix: choose one of {sorted(sources)}")
    reward = rewards.choose(fields["reward"])
    train, test = sources[name](fields, seed)
    return Task(
        name=name,
        train=_take(train, fields["train_size"], "task.train_size"),
        test=_take(test, fields["test_size"], "task.test_size"),
        reward=reward,
    )


def _checked(config: Mapping) -> dict:
    """`config` with the defaults filled in."""
    fields = DEFAULTS | dict(config)
    if unknown := sorted(set(fields) - set(DEFAULTS) - set(REQUIRED)):
        raise ValueError(
            f"task.{unknown[0]}={fields[unknown[0]]!r} is an unknown field; "
            f"fix: remove it, or use one of {sorted([*REQUIRED, *DEFAULTS])}"
        )
    for key in REQUIRED:
        _required(fields, key)
    for key in ("train_size", "test_size", "digits"):
        if not isinstance(fields[key], int) or fields[key] < 1:
            raise ValueError(f"task.{key}={fields[key]!r}; fix: give a whole number above 0")
    return fields


def _required(fields: dict, key: str):
    if fields.get(key) in (None, ""):
        raise ValueError(f"task.{key} is missing; fix: set it in the task's config")
    return fields[key]


def _take(examples: Iterable[Example], size: int, key: str) -> tuple[Example, ...]:
    taken = tuple(itertools.islice(examples, size))
    if len(taken) < size:
        raise ValueError(
            f"{key}={size}, but the task has {len(taken)} distinct questions on this side of the "
            f"split (one in {HELD_OUT_ONE_IN} is held out unless task.test_path is given); "
            f"fix: lower {key} to {len(taken)} or less, or choose a larger task"
        )
    return taken


def _split(examples: Iterable[Example]) -> tuple[Iterator[Example], Iterator[Example]]:
    """(train, test): both keep the order of `examples`; neither depends on how much is taken."""

    def held_out(example: Example) -> bool:
        return question_hash(example) % HELD_OUT_ONE_IN == 0

    for_train, for_test = itertools.tee(examples)
    return itertools.filterfalse(held_out, for_train), filter(held_out, for_test)


def _running_sum(fields: dict, seed: int) -> tuple[Iterator[Example], Iterator[Example]]:
    """'3141592653=' asks for the sums of the digits so far, modulo 10: '3489...'.

    Every output digit needs the one before, so a single error in the rollout carries on to the end.
    """

    def ask(digits_T: np.ndarray) -> Example:
        answer_T = np.cumsum(digits_T) % 10
        return Example("".join(map(str, digits_T)) + "=", "".join(map(str, answer_T)))

    return _of_digits(fields, seed, ask)


def _digit_sum(fields: dict, seed: int) -> tuple[Iterator[Example], Iterator[Example]]:
    """'What is 3 + 4? Answer briefly.': in words that a chat model knows, for real weights."""

    def ask(digits_T: np.ndarray) -> Example:
        question = f"What is {' + '.join(map(str, digits_T))}? Answer briefly."
        return Example(question, f"{digits_T.sum()}")

    return _of_digits(fields, seed, ask)


def _of_digits(
    fields: dict, seed: int, ask: Callable[[np.ndarray], Example]
) -> tuple[Iterator[Example], Iterator[Example]]:
    """What `ask` makes of random digits, `task.digits` at a time."""

    def draw() -> Iterator[Example]:
        rng = np.random.default_rng(seed)
        while True:
            yield ask(rng.integers(0, 10, fields["digits"]))

    return _split(distinct(draw(), PATIENCE))


def _reasoning_gym(fields: dict, seed: int) -> tuple[Iterator[Example], Iterator[Example]]:
    """Questions of a reasoning-gym data set.

    Its own scorers pay for spam and are not used; so of a question with several right answers (as
    in countdown) only the one that the data set names is rewarded. Nearly all make their questions
    one by one, as they are read; the two that make them all at once (acre, word_ladder) need a
    smaller pool in `task.options.size`. The pool is fixed, since questions may depend on its size.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "task.name='reasoning_gym' needs the package reasoning-gym; "
            "fix: pip install -r requirements-tasks.txt, or set task.name='running_sum'"
        ) from error
    dataset, options = _required(fields, "dataset"), {"size": 10**6} | dict(fields["options"])
    if "seed" in options:
        raise ValueError(
            f"task.options.seed={options['seed']!r} is not the task's to set; "
            "fix: remove it, and set the run's seed"
        )
    try:
        items = reasoning_gym.create_dataset(dataset, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"task.dataset={dataset!r} with task.options={options!r} was refused by reasoning-gym: "
            f"{error}; fix: choose a name from reasoning_gym.factory.DATASETS and its settings"
        ) from error

    def read() -> Iterator[Example]:
        for index in range(len(items)):
            item = items[index]
            if not isinstance(item["answer"], str) or not item["answer"].strip():
                raise ValueError(
                    f"task.dataset={dataset!r}: item {index} has no single right answer; "
                    "fix: choose a data set whose questions have one"
                )
            yield Example(item["question"].strip(), item["answer"].strip())

    return _split(distinct(read(), PATIENCE))


def _jsonl(fields: dict, seed: int) -> tuple[Iterator[Example], Iterator[Example]]:
    """Questions of JSONL files, in the file's order. No training question is in the test file."""
    del seed
    rows = distinct(_read(fields, "path"))
    if not fields["test_path"]:
        return _split(rows)
    test = list(distinct(_read(fields, "test_path")))
    tested = set(map(question_hash, test))
    return (row for row in rows if question_hash(row) not in tested), iter(test)


def _read(fields: dict, key: str) -> list[Example]:
    path = pathlib.Path(_required(fields, key))
    if not path.is_file():
        raise FileNotFoundError(
            f"task.{key}={str(path)!r} is not a file; fix: give the path of a JSONL file"
        )
    return read_jsonl(path)
