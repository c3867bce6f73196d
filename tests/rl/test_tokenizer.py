import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.rl.tokenizer import ByteTokenizer

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
