import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from trace_jax.rl import chat
from trace_jax.rl.tokenizer import ByteTokenizer, CheckpointTokenizer

TOKENIZER = ByteTokenizer()


def test_ids_are_bytes_and_the_vocabulary_fills_fp4_blocks():
    assert TOKENIZER.encode("1=é") == [0x31, 0x3D, 0xC3, 0xA9]
    assert TOKENIZER.stop_ids == (TOKENIZER.eos_id,) == (257,)
    assert TOKENIZER.pad_id == 256
    assert TOKENIZER.vocab_size == 272
    assert TOKENIZER.vocab_size % 16 == 0


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decode_inverts_encode(text):
    assert TOKENIZER.decode(np.array(TOKENIZER.encode(text), np.int32)) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_whatever_a_model_samples_can_be_decoded(ids):
    assert TOKENIZER.decode(ids) == TOKENIZER.decode([i for i in ids if i < 256])


def test_broken_text_does_not_stop_a_run():
    assert TOKENIZER.decode([0xC3, 257, 256, 271]) == "\ufffd"
    assert TOKENIZER.encode("\ud83d") == [ord("?")]


def test_a_chat_of_bytes_is_its_last_question():
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert TOKENIZER.chat([*messages, {"role": "user", "content": "3="}]) == [0x33, 0x3D]
    with pytest.raises(ValueError, match="'user'"):
        TOKENIZER.chat([{"role": "system", "content": "1"}])


# A checkpoint's tokenizer: bytes of a few letters, two merges, the special tokens of Qwen.
LETTERS = ["Ġ", "Ċ", "Ã", "©", *"0123456789+=?.", *"abcdefghijklmnopqrstuvwxyz"]
MERGED = ["hi", "Ġhi"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*LETTERS, *MERGED, *SPECIAL, "<think>", "</think>"]
ENDOFTEXT, IM_START, IM_END = map(TOKENS.index, SPECIAL)

# In the shape of Qwen3.5's: macros, namespaces, tools, thinking that past turns lose.
TEMPLATE = """
{%- macro text(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('No messages.') }}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set last.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
    {%- endif %}
    {%- set content = text(message.content) | trim %}
    {%- if message.role == 'assistant' and loop.index0 < last.query %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def write_tokenizer(directory, added=TOKENS[-5:], change=lambda tokenizer: None):
    vocabulary = {token: i for i, token in enumerate([*LETTERS, *MERGED])}
    model = models.BPE(vocabulary, [("h", "i"), ("Ġ", "hi")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in added:
        tokenizer.add_tokens([AddedToken(token, special=token in SPECIAL, normalized=False)])
    change(tokenizer)
    tokenizer.save(str(directory / "tokenizer.json"))


def write_json(directory, **files):
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))


@pytest.fixture
def directory(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def ids(*tokens):
    return [TOKENS.index(token) for token in tokens]


def test_a_checkpoints_text_becomes_its_ids_and_back(directory):
    tokenizer = CheckpointTokenizer(directory)
    assert tokenizer.encode("hi hi 1é") == ids("hi", "Ġhi", "Ġ", "1", "Ã", "©")
    assert tokenizer.encode("a<|im_end|>") == ids("a", "<|im_end|>")
    assert tokenizer.decode(np.array(ids("hi", "Ġhi", "Ġ", "1", "Ã", "©"))) == "hi hi 1é"
    assert tokenizer.vocab_size == len(TOKENS)


def test_decoding_drops_what_is_no_text(directory):
    tokenizer = CheckpointTokenizer(directory)
    sampled = ids("<think>", "a", "</think>", "hi", "<|im_end|>", "<|endoftext|>", "<|im_start|>")
    assert tokenizer.decode(sampled) == "<think>a</think>hi"
    assert tokenizer.decode([*ids("a"), len(TOKENS), 10**6, -1, *ids("b")]) == "ab"
    assert tokenizer.decode(ids("Ã")) == "\ufffd"


def test_a_lone_surrogate_does_not_stop_a_run(directory):
    assert CheckpointTokenizer(directory).encode("a\ud83d") == ids("a", "?")


def test_lengths_that_the_file_was_saved_with_do_not_count(tmp_path):
    def change(tokenizer):
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=8)

    write_tokenizer(tmp_path, change=change)
    assert CheckpointTokenizer(tmp_path).encode("abc") == ids("a", "b", "c")


@pytest.mark.parametrize(
    ("files", "stop_ids", "pad_id"),
    [
        ({}, (IM_END, ENDOFTEXT), ENDOFTEXT),
        (  # Qwen3.5: config.json knows the end of a document alone, and nests it
            {"config": {"text_config": {"eos_token_id": ENDOFTEXT}}},
            (IM_END, ENDOFTEXT),
            ENDOFTEXT,
        ),
        (  # Qwen3
            {
                "generation_config": {"eos_token_id": [IM_END, ENDOFTEXT], "pad_token_id": 5},
                "config": {"eos_token_id": IM_END, "pad_token_id": None},
            },
            (IM_END, ENDOFTEXT),
            5,
        ),
        (  # further ends, each file with its own; the tokenizer's pad before the others
            {
                "generation_config": {"eos_token_id": [7, 8], "pad_token_id": -1},
                "config": {"eos_token_id": 9, "pad_token_id": 3},
                "tokenizer_config": {"eos_token": {"content": "<think>"}, "pad_token": "?"},
            },
            (IM_END, 7, 8, 9, TOKENS.index("<think>"), ENDOFTEXT),
            TOKENS.index("?"),
        ),
    ],
)
def test_every_id_that_ends_a_turn_stops(directory, files, stop_ids, pad_id):
    write_json(directory, **files)
    tokenizer = CheckpointTokenizer(directory)
    assert tokenizer.stop_ids == stop_ids
    assert tokenizer.eos_id == IM_END
    assert tokenizer.pad_id == pad_id


def test_the_template_makes_the_prompt(directory):
    tokenizer = CheckpointTokenizer(directory)
    question = [{"role": "user", "content": "hi"}]
    asked = ids("<|im_start|>", *"user", "Ċ", "hi", "<|im_end|>", "Ċ")
    asked += ids("<|im_start|>", *"assistant", "Ċ", "<think>", "Ċ")
    assert tokenizer.chat(question) == asked
    unthinking = asked + ids("Ċ", "</think>", "Ċ", "Ċ")
    assert tokenizer.chat(question, enable_thinking=False) == unthinking
    fixed = CheckpointTokenizer(directory, (("enable_thinking", False),))
    assert fixed.chat(question) == unthinking
    assert fixed.chat(question, enable_thinking=True) == asked


def test_templates_render_as_in_transformers():
    turns = [
        {"role": "system", "content": "Be <brief>."},
        {"role": "user", "content": [{"text": "a "}, {"text": "b"}]},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nc"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "<think>\ny\n</think>\n\ne"},
    ]
    rendered = chat.render(TEMPLATE, turns, tools=[{"name": "é<", "n": 1}])
    assert rendered == (
        '<|im_start|>system\n{"name": "é<", "n": 1}<|im_end|>\n'
        "<|im_start|>system\nBe <brief>.<|im_end|>\n"
        "<|im_start|>user\na b<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n"
        "<|im_start|>assistant\n<think>\ny\n</think>\n\ne<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_what_templates_may_use():
    blocks = "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
    blocks += "{{ m.role }}\n{% endfor %}\n{% generation %}\n<{{ bos_token }}>{% endgeneration %}"
    assert chat.render(blocks, [{"role": "a"}, {"role": "b"}], bos_token="S") == "a\n<S>"
    assert len(chat.render("{{ strftime_now('%Y') }}", [])) == 4


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (TEMPLATE, "must be at the beginning"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ missing.name }}", "'missing' is undefined"),
    ],
)
def test_a_refusal_says_why(template, reason):
    turns = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(ValueError, match=reason):
        chat.render(template, turns)


def test_where_the_template_is_looked_for(directory):
    question = [{"role": "user", "content": "hi"}]
    fields = {"chat_template": "{{ eos_token }}=", "eos_token": "<|im_end|>"}
    write_json(directory, tokenizer_config=fields)
    assert CheckpointTokenizer(directory).chat(question)[0] == IM_START  # its own file comes first
    (directory / "chat_template.jinja").unlink()
    assert CheckpointTokenizer(directory).chat(question) == ids("<|im_end|>", "=")
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    write_json(directory, tokenizer_config={"chat_template": named})
    assert CheckpointTokenizer(directory).chat(question) == ids("b")
    write_json(directory, tokenizer_config={})
    with pytest.raises(ValueError, match=r"no chat template; fix: add chat_template.jinja"):
        CheckpointTokenizer(directory).chat(question)


def test_bad_directories_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json is missing"):
        CheckpointTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizers package cannot read"):
        CheckpointTokenizer(tmp_path)
    write_tokenizer(tmp_path, added=[])
    with pytest.raises(ValueError, match="no stop id; fix: name one"):
        CheckpointTokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("[7")
    with pytest.raises(ValueError, match=r"generation_config.json: not valid JSON"):
        CheckpointTokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("[7]")
    with pytest.raises(ValueError, match=r"generation_config.json: list where"):
        CheckpointTokenizer(tmp_path)


def test_settings_can_hold_one(directory):
    assert CheckpointTokenizer(directory) == CheckpointTokenizer(str(directory))
    assert hash(CheckpointTokenizer(directory)) == hash(CheckpointTokenizer(directory))
    thinking = CheckpointTokenizer(directory, (("enable_thinking", True),))
    assert CheckpointTokenizer(directory) != thinking
