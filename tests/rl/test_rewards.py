import gc
import threading
import time

import pytest

from trace_jax.rl import math_process, rewards
from trace_jax.rl.examples import Example


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42\n", "42"),
        ("so <answer> 42 </answer>, I think", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>a <answer>2</answer>", "2"),
        ("<answer>1</answer> \\boxed{2} #### 3", "1"),
        ("thus \\boxed{1} or \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("{ \\boxed{\\boxed{4}} }", "4"),
        ("} \\boxed{4} and \\boxed{5", "4"),
        ("24+48 = 72\n#### 72\nThe end", "72"),
        ("#### 1 #### 2", "2"),
        ("####", ""),
        ("<answer>42", "<answer>42"),
        ("42</answer>", "42</answer>"),
        ("\\boxed{42", "\\boxed{42"),
        ("", ""),
    ],
)
def test_extract(text, answer):
    assert rewards.extract(text) == answer


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("4", "4", 1.0),
        (" 4 ", "4", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("\\boxed{-1234567.5}", "-1,234,567.5", 1.0),
        ("1, 2", "1, 2", 1.0),
        ("1,2", "12", 0.0),  # not the grouping of one number
        ("0123456789", "4", 0.0),
        ("4 4", "4", 0.0),
        ("1 2 3 4", "4", 0.0),
        ("Answer: 4", "4", 0.0),
        ("<answer>1</answer><answer>4</answer><answer>9</answer>", "4", 0.0),
        ("", "4", 0.0),
        ("4.0", "4", 0.0),
    ],
)
def test_exact_match_pays_for_the_answer_and_not_for_spam(completion, answer, reward):
    assert rewards.exact_match(completion, Example("?", answer)) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("3 + 4 = 7.", 1), ("7", 1), ("It is 7, not 8", 0), ("seven", 0), ("", 0),
        ("07", 1), ("-7", 0), ("1,007", 0), ("7\n", 1), ("7.5", 0), ("7.0", 1), ("14-7", 1),
    ],
)  # fmt: skip
def test_the_last_number_counts(completion, reward):
    assert rewards.last_number(completion, Example(prompt="", answer="7")) == reward


@pytest.mark.parametrize("spam", ["\\boxed{", "<answer>", "{", "}", "####", "\\boxed{}"])
def test_extraction_takes_linear_time(spam):
    gc.disable()  # a collection walks all that the other tests left behind

    def cpu_time(times):
        start = time.process_time()  # not wall time: other processes must not count
        rewards.extract(spam * times)
        return time.process_time() - start

    short, long = (min(cpu_time(times) for _ in range(3)) for times in (20_000, 160_000))
    gc.enable()
    assert long < 40 * max(short, 1e-2)  # linear: 8 times; quadratic: 64


def test_an_unknown_reward_lists_the_choices():
    with pytest.raises(
        ValueError, match=r"task.reward='f1' is unknown; .*\['exact', 'math', 'number'\]"
    ):
        rewards.choose("f1")


def test_a_missing_math_verify_names_the_fix(monkeypatch):
    monkeypatch.setattr(rewards, "_MATH", rewards._MathProcess())
    monkeypatch.setattr(rewards.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install -r requirements-tasks.txt"):
        rewards.choose("math")


class TestMath:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("math_verify")

    @pytest.mark.parametrize(
        ("completion", "answer", "reward"),
        [
            ("The answer is 0.5.", "\\frac{1}{2}", 1.0),
            ("\\boxed{1/2}", "0.5", 1.0),
            ("<answer>13</answer>", "13", 1.0),
            ("<answer>$\\frac{26}{2}$</answer>", "13", 1.0),
            ("#### 1,234", "1234", 1.0),
            ("x is \\boxed{x = 4}", "4", 1.0),
            ("{2, 1}", "\\{1, 2\\}", 0.0),
            ("\\boxed{\\{2, 1\\}}", "\\{1, 2\\}", 1.0),
            ("0123456789", "4", 0.0),
            ("\\boxed{1, 2, 3, 4}", "4", 0.0),
            ("\\boxed{3} or \\boxed{4}", "3", 0.0),
            ("", "4", 0.0),
            ("no idea \ud83d", "4", 0.0),
        ],
    )
    def test_equal_values_are_equal(self, completion, answer, reward):
        assert rewards.math_equal(completion, Example("?", answer)) == reward

    def test_it_works_in_a_thread(self):
        scores = []
        example = Example("?", "4")
        thread = threading.Thread(target=lambda: scores.append(rewards.math_equal("4", example)))
        thread.start()
        thread.join()
        assert scores == [1.0]

    def test_a_formula_without_end_scores_zero_and_the_next_one_is_scored(self):
        example = Example("?", "4")
        start = time.perf_counter()
        assert rewards.math_equal("\\boxed{9^{9^{9^{9}}}}", example) == 0.0
        assert time.perf_counter() - start < math_process.SECONDS + 15
        assert rewards.math_equal("\\boxed{4}", example) == 1.0
