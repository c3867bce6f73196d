import json

import pytest

from trace_jax.rl import examples
from trace_jax.rl.examples import Example

PINNED = 0x5F14EBEC05CB06EF


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_gsm8k_row_keeps_its_worked_solution(tmp_path):
    solution = "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 1,024"
    path = write(tmp_path / "gsm8k.jsonl", {"question": " How many? ", "answer": solution}, "", " ")
    assert examples.read_jsonl(path) == [Example("How many?", "1,024", solution)]


def test_verl_rows_hold_a_text_or_a_chat(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    path = write(
        tmp_path / "verl.jsonl",
        {"data_source": "x", "prompt": "1+1?", "reward_model": {"ground_truth": 2}},
        {
            "data_source": "x",
            "prompt": chat,
            "reward_model": {"ground_truth": "4", "style": "rule"},
        },
    )
    assert examples.read_jsonl(path) == [Example("1+1?", "2"), Example("Be brief.\n\n2+2?", "4")]
    assert examples.read_jsonl(path)[1].solution == "4"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1+1?"}, r"line 2: no answer; keys present: \['question'\]; fix: give"),
        ({"question": "1+1?", "answer": None}, "line 2: no answer"),
        ({"question": "1+1?", "answer": "It is two. ####"}, "line 2: no answer"),
        ({"prompt": "1+1?", "reward_model": {"style": "rule"}}, "line 2: no answer"),
        ({"prompt": "1+1?", "reward_model": "2"}, "line 2: no answer"),
        ({"question": "1+1?", "answer": True}, "line 2: no answer"),
        ({"answer": "2"}, r"line 2: no question; keys present: \['answer'\]; fix: give"),
        ({"question": "  ", "answer": "2"}, "line 2: no question"),
        ({"prompt": [], "answer": "2"}, "line 2: no question"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, "line 2: no question"),
        ({"prompt": ["1+1?"], "answer": "2"}, "line 2: no question"),
        ('{"question": "1+1?", ', "line 2: not valid JSON .*; fix: write one JSON object"),
        ('["1+1?", "2"]', "line 2: list where a JSON object is expected"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, message):
    path = write(tmp_path / "rows.jsonl", {"question": "0+1?", "answer": "1"}, row)
    with pytest.raises(ValueError, match=r"rows.jsonl, " + message):
        examples.read_jsonl(path)


def test_bytes_that_are_not_text_are_a_bad_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "\xff", "answer": "1"}')
    with pytest.raises(ValueError, match="line 1: not valid JSON"):
        examples.read_jsonl(path)


def test_the_hash_of_a_question_is_pinned():
    """It decides the split, so a change of it would move test questions into training."""
    assert examples.question_hash(Example("3141592653=", "3489435169")) == PINNED
    assert examples.question_hash(Example(" 3141592653=\n", "other")) == PINNED
    assert examples.question_hash(Example("3141592654=", "3489435169")) != PINNED


def test_distinct_keeps_the_first_and_gives_up_on_an_exhausted_stream():
    def forever():
        yield Example("a", "1")
        yield Example("b", "2")
        while True:
            yield Example(" a", "3")

    assert list(examples.distinct(forever(), patience=10)) == [Example("a", "1"), Example("b", "2")]
    repeated = [Example("a", "1")] * 5 + [Example("b", "2")]
    assert list(examples.distinct(repeated)) == [Example("a", "1"), Example("b", "2")]
