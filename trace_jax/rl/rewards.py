"""Rewards: 1 where the completion's final answer is the example's, 0 elsewhere. No partial credit.

Scorers that give credit to a text containing the answer are soon paid for spam ('0123456789'
contains '4'), so the answer is extracted first and then compared whole.
"""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable

from trace_jax.rl.examples import Example

_BRACE = re.compile(r"(\\boxed)?\{|\}")
_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")


def exact_match(completion: str, example: Example) -> float:
    """1.0 if the extracted answer is the example's answer, up to outer space and digit grouping."""
    return float(_normalized(extract(completion)) == _normalized(example.answer))


def math_equal(completion: str, example: Example) -> float:
    """1.0 if math-verify finds the extracted answer equal to the example's (0.5 = \\frac{1}{2}).

    Without a marked answer, the last number or formula of the text counts. A comparison that does
    not end within `math_process.SECONDS` scores 0.

    Raises:
      ImportError: math-verify is not installed.
    """
    # \boxed tells math-verify that the whole text is one formula, not prose with formulas in it
    marked = _marked(completion)
    prediction = completion.strip() if marked is None else f"\\boxed{{{marked}}}"
    return float(_MATH.equal(f"\\boxed{{{example.answer.strip()}}}", prediction))


def last_number(completion: str, example: Example) -> float:
    """1.0 if the last number of the text is the answer ("3 + 4 = 7." answers 7).

    Raises ValueError where the answer is no number.
    """
    numbers = re.findall(r"(?<!\d)-?\d+(?:\.\d+)?", completion.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(example.answer))


def choose(name: str) -> Callable[[str, Example], float]:
    """The reward called `name`, tried once, so that a missing package is found now and not later.

    Raises:
      ValueError: there is no such reward.
      ImportError: it needs a package that is not installed.
    """
    rewards = {"exact": exact_match, "math": math_equal, "number": last_number}
    if name not in rewards:
        raise ValueError(f"task.reward={name!r} is unknown; fix: choose one of {sorted(rewards)}")
    rewards[name]("1", Example(prompt="", answer="1"))
    return rewards[name]


def extract(text: str) -> str:
    """The final answer that `text` marks, or all of `text`, stripped.

    Marks, in order: the last <answer>...</answer>, the last closed \\boxed{...}, the rest of the
    line after the last '####'.
    """
    marked = _marked(text)
    return text.strip() if marked is None else marked


def _marked(text: str) -> str | None:
    before, closed, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    if opened and closed:
        return answer.strip()
    if (boxed := _last_boxed(text)) is not None:
        return boxed.strip()
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip()
    return None


def _last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, inner braces balanced; None where none is closed."""
    opened, start, end = [], -1, -1
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (opening := opened.pop())[1] and opening.end() > start:
            start, end = opening.end(), brace.start()
    return text[start:end] if start >= 0 else None


def _normalized(answer: str) -> str:
    answer = answer.strip()
    return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer


class _MathProcess:
    """math-verify in a child process, which ends where a formula takes too long.

    Its own time limit is a signal handler: that works in the main thread only, and not inside one
    long integer operation.
    """

    def __init__(self):
        self._process = None
        self._lock = threading.Lock()

    def equal(self, gold: str, prediction: str) -> bool:
        with self._lock:
            if self._process is None:
                self._process = self._start()
            try:
                self._process.stdin.write(json.dumps([gold, prediction]).encode() + b"\n")
                self._process.stdin.flush()
                verdict = self._process.stdout.readline()
            except BrokenPipeError:
                verdict = b""
            if not verdict:  # the child has ended; a fresh one serves the next pair
                self._process.communicate()
                self._process = None
            return verdict == b"1\n"

    def _start(self) -> subprocess.Popen:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(
                "task.reward='math' needs the package math-verify; "
                "fix: pip install -r requirements-tasks.txt, or set task.reward='exact'"
            )
        process = subprocess.Popen(
            # -P: the names of our modules must not shadow what math-verify imports
            [sys.executable, "-P", str(pathlib.Path(__file__).with_name("math_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(
                "task.reward='math': math-verify failed to start (its own error is above); "
                "fix: reinstall it, pip install -r requirements-tasks.txt"
            )
        return process


_MATH = _MathProcess()
