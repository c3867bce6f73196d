import json
import sys

import ml_collections
import pytest

from trace_jax.rl import rewards, tasks
from trace_jax.rl.examples import Example, question_hash

PINNED = (Example("8652=", "8491"), Example("3000=", "3333"))  # numpy's generator, seed 0


def running_sum(**fields):
    return {"name": "running_sum", "train_size": 64, "test_size": 16, **fields}


def jsonl(tmp_path, questions, **fields):
    path = tmp_path / "train.jsonl"
    rows = [json.dumps({"question": q, "answer": f"It is\n#### {q}"}) for q in questions]
    path.write_text("\n".join(rows))
    return {"name": "jsonl", "path": str(path), "train_size": 8, "test_size": 2, **fields}


def prompts(examples):
    return [example.prompt for example in examples]


def test_running_sum_asks_for_the_sums_so_far_modulo_ten():
    task = tasks.load(running_sum(), seed=0)
    assert task.name == "running_sum"
    assert task.reward is rewards.exact_match
    assert (len(task.train), len(task.test)) == (64, 16)
    for example in task.train + task.test:
        digits = [int(digit) for digit in example.prompt.removesuffix("=")]
        assert len(digits) == len(example.answer) == 10
        assert example.answer == "".join(str(sum(digits[: i + 1]) % 10) for i in range(10))
        assert example.solution == example.answer
        assert task.reward(example.answer, example) == 1


def test_digit_sum_asks_in_words_and_the_last_number_answers():
    sizes = {"train_size": 80, "test_size": 11}
    task = tasks.load({"name": "digit_sum", "digits": 2, "reward": "number", **sizes}, seed=0)
    assert len(set(task.train + task.test)) == 91  # of 100 there are
    for example in task.train + task.test:
        a, b = map(
            int,
            example.prompt.removeprefix("What is ").removesuffix("? Answer briefly.").split(" + "),
        )
        assert int(example.answer) == a + b
        assert task.reward(f"{a} + {b} = {a + b}.", example) == 1


def test_the_questions_of_a_seed_are_pinned():
    assert tasks.load(running_sum(digits=4), seed=0).train[:2] == PINNED


def test_same_seed_same_task_and_another_seed_another():
    first, again, other = (tasks.load(running_sum(), seed) for seed in (0, 0, 1))
    assert (first.train, first.test) == (again.train, again.test)
    assert not set(first.train) & set(other.train)


@pytest.mark.parametrize("digits", [3, 10])
def test_no_test_question_is_trained_on_whatever_the_seed(digits):
    loaded = [tasks.load(running_sum(digits=digits), seed) for seed in range(4)]
    trained = {example.prompt for task in loaded for example in task.train}
    tested = {example.prompt for task in loaded for example in task.test}
    assert not trained & tested
    assert all(len(set(prompts(task.train))) == 64 for task in loaded)


def test_sizes_cut_the_same_two_lists():
    small, large = (tasks.load(running_sum(train_size=n), seed=0) for n in (16, 256))
    assert small.test == large.test
    assert small.train == large.train[:16]
    assert tasks.load(running_sum(test_size=4), seed=0).train == tasks.load(running_sum(), 0).train


def test_too_few_questions_say_how_many_there_are():
    available = sum(
        question_hash(Example(f"{n:02d}=", "")) % tasks.HELD_OUT_ONE_IN == 0 for n in range(100)
    )
    with pytest.raises(
        ValueError, match=f"task.test_size=80, .* has {available} distinct .* lower"
    ):
        tasks.load(running_sum(digits=2, test_size=80), seed=0)
    with pytest.raises(ValueError, match=f"task.train_size=99, .* has {100 - available} distinct"):
        tasks.load(running_sum(digits=2, train_size=99, test_size=1), seed=0)


def test_a_config_dict_with_the_fields_of_every_task_is_fine():
    config = ml_collections.ConfigDict(tasks.DEFAULTS | running_sum())
    assert tasks.load(config, seed=0) == tasks.load(running_sum(), seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "sums"}, r"task.name='sums' .*\['digit_sum', 'jsonl', 'reasoning"),
        ({"name": None}, "task.name is missing"),
        ({"digit": 3}, "task.digit=3 is an unknown field; fix: .*'digits'"),
        ({"reward": "partial"}, r"task.reward='partial' .*\['exact', 'math', 'number'\]"),
        ({"train_size": 0}, "task.train_size=0; fix"),
        ({"test_size": 2.5}, "task.test_size=2.5; fix"),
        ({"digits": "4"}, "task.digits='4'; fix"),
        ({"name": "jsonl"}, "task.path is missing"),
    ],
)
def test_a_bad_field_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        tasks.load(running_sum(**fields), seed=0)


def test_a_required_field_left_out_is_named():
    with pytest.raises(ValueError, match=r"task.train_size is missing; fix"):
        tasks.load({"name": "running_sum", "test_size": 2}, seed=0)


def test_jsonl_holds_questions_out_of_its_one_file(tmp_path):
    questions = [str(n) for n in range(100)]
    config = jsonl(tmp_path, [*questions, *questions])
    task = tasks.load(config, seed=0)
    assert not set(task.train) & set(task.test)
    assert (len(task.train), len(task.test)) == (8, 2)
    assert prompts(task.train) == sorted(prompts(task.train), key=int)
    assert task.train[0].solution == f"It is\n#### {task.train[0].answer}"
    assert task.reward(task.train[0].solution, task.train[0]) == 1
    with pytest.raises(ValueError, match=r"task.train_size=200, .* distinct"):
        tasks.load(config | {"train_size": 200}, seed=0)


def test_a_question_of_the_test_file_is_not_trained_on(tmp_path):
    test_path = tmp_path / "test.jsonl"
    test_path.write_text('{"question": " 0 ", "answer": "0"}\n{"question": "5", "answer": "5"}')
    config = jsonl(tmp_path, map(str, range(10)), test_path=str(test_path), test_size=1)
    task = tasks.load(config, seed=0)
    assert prompts(task.test) == ["0"]
    assert prompts(task.train) == ["1", "2", "3", "4", "6", "7", "8", "9"]


def test_a_missing_file_is_named(tmp_path):
    config = jsonl(tmp_path, [])
    with pytest.raises(FileNotFoundError, match=r"task.path='.*nowhere.jsonl' is not a file; fix"):
        tasks.load(config | {"path": str(tmp_path / "nowhere.jsonl")}, seed=0)


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("reasoning_gym")

    def config(self, **fields):
        return {
            "name": "reasoning_gym",
            "dataset": "chain_sum",
            "options": {"max_terms": 2, "max_digits": 2},
            "train_size": 32,
            "test_size": 8,
            **fields,
        }

    def test_questions_are_split_by_text(self):
        task, other = (tasks.load(self.config(), seed) for seed in (0, 1))
        assert task == tasks.load(ml_collections.ConfigDict(self.config()), seed=0)
        assert len(set(prompts(task.train + task.test))) == 40
        assert not set(prompts(task.train + other.train)) & set(prompts(task.test + other.test))
        assert all(task.reward(example.answer, example) == 1 for example in task.train)
        assert task.reward("0123456789", task.train[0]) == 0

    def test_a_generator_that_makes_all_at_once_takes_a_smaller_pool(self):
        fields = {"dataset": "word_ladder", "train_size": 4, "test_size": 1}
        with pytest.raises(ValueError, match=r"task.options={'size': 1000000} .* too large"):
            tasks.load(self.config(**fields, options={}), seed=0)
        assert len(tasks.load(self.config(**fields, options={"size": 100}), seed=0).train) == 4

    def test_an_exhausted_generator_stops(self):
        options = {"max_terms": 2, "max_digits": 1}  # 200 questions
        with pytest.raises(ValueError, match=r"task.train_size=500, .* distinct"):
            tasks.load(self.config(options=options, train_size=500), seed=0)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"dataset": ""}, "task.dataset is missing"),
            ({"dataset": "chain_sums"}, "task.dataset='chain_sums' .* was refused"),
            ({"options": {"max_term": 2}}, "task.options={.*'max_term': 2} was refused"),
            ({"options": {"max_terms": 0}}, "task.options={.*'max_terms': 0} was refused"),
            ({"options": {"seed": 0}}, "task.options.seed=0 is not the task's to set"),
            ({"dataset": "graph_color", "options": {}}, "no single right answer"),
        ],
    )
    def test_a_bad_field_is_named(self, fields, message):
        with pytest.raises(ValueError, match=message):
            tasks.load(self.config(**fields), seed=0)


def test_a_missing_reasoning_gym_names_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    config = running_sum(name="reasoning_gym", dataset="chain_sum")
    with pytest.raises(ImportError, match=r"pip install -r requirements-tasks.txt"):
        tasks.load(config, seed=0)
