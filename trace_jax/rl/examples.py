"""One question with its answer, and the JSONL files that hold them."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True)
class Example:
    """A question, its final answer, and the text a supervised warm-up imitates."""

    prompt: str
    answer: str
    solution: str = ""  # the worked solution; the answer where none is given

    def __post_init__(self):
        if not self.solution:
            object.__setattr__(self, "solution", self.answer)


def question_hash(example: Example) -> int:
    """64 bits that name the question: the same in every process, whatever its spacing."""
    text = " ".join(example.prompt.split()).encode("utf-8", errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def distinct(examples: Iterable[Example], patience: int | None = None) -> Iterator[Example]:
    """`examples` without repeated questions, first come first kept.

    A generator of random questions never ends, it only stops saying anything new: with `patience`,
    the stream ends after that many repeats in a row.
    """
    seen, repeats = set(), 0
    for example in examples:
        name = question_hash(example)
        if name not in seen:
            seen.add(name)
            repeats = 0
            yield example
        elif (repeats := repeats + 1) == patience:
            return


def read_jsonl(path: str | pathlib.Path) -> list[Example]:
    """The examples of a file with one JSON object a line; empty lines are skipped.

    A row holds its question in 'question' (GSM8K) or in 'prompt' (text, or chat messages, whose
    contents are joined by an empty line), and its answer in 'answer' or in
    'reward_model': {'ground_truth': ...} (verl). Of an answer with '####' (GSM8K) the part after it
    is the answer, the whole is the solution. Other keys are ignored.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a row is not a JSON object, or lacks question or answer; says which, and where.
    """
    with open(path, "rb") as lines:
        return [
            _example(line, f"{path}, line {number}")
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]


def _example(line: bytes, place: str) -> Example:
    try:
        row = json.loads(line)
    except ValueError as error:  # broken JSON or broken UTF-8
        raise ValueError(
            f"{place}: not valid JSON ({error}); fix: write one JSON object on each line"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{place}: {type(row).__name__} where a JSON object is expected; "
            "fix: write one object with a question and an answer on each line"
        )
    prompt = _question(row)
    if not prompt:
        raise ValueError(
            f"{place}: no question; keys present: {sorted(row)}; fix: give the row 'question': "
            "text, or 'prompt': text or a list of chat messages {'role': ..., 'content': text}"
        )
    solution = _answer(row)
    answer = solution.rpartition("####")[2].strip()
    if not answer:
        raise ValueError(
            f"{place}: no answer; keys present: {sorted(row)}; fix: give the row 'answer': text "
            "(the final answer, or a solution ending in '#### answer'), "
            "or 'reward_model': {'ground_truth': text}"
        )
    return Example(prompt, answer, solution)


def _question(row: dict) -> str:
    """The text of the question, '' where the row has none."""
    question = row.get("question", row.get("prompt"))
    if isinstance(question, list):
        contents = [message.get("content") for message in question if isinstance(message, dict)]
        if len(contents) < len(question) or not all(isinstance(text, str) for text in contents):
            return ""
        question = "\n\n".join(contents)
    return question.strip() if isinstance(question, str) else ""


def _answer(row: dict) -> str:
    """The text of the answer or solution, '' where the row has none; numbers are written out."""
    answer = row.get("answer")
    if answer is None and isinstance(row.get("reward_model"), dict):
        answer = row["reward_model"].get("ground_truth")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    return answer.strip() if isinstance(answer, str) else ""
