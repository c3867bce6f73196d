"""Bytes of guidance from sizes alone: the paper's model, and what a forward really records."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.small_model import CFG, EVERYTHING, SITE_LAYERS
from trace_jax.analysis import record_bytes
from trace_jax.guidance import policy, record
from trace_jax.models import architecture, config, decoder

PAPER = config.get("qwen3_5_35b_a3b")
PAPER_SITES = ("experts/in", "attention/[kv]")


@functools.cache
def paper():
    """The table's rows by encoding."""
    rules = [("experts/*", "nvfp4"), ("attention/[kv]", "nvfp4")]
    quantized = policy.resolve(rules, architecture.sites(PAPER))
    return {row["encoding"]: row for row in record_bytes.table(PAPER, quantized, PAPER_SITES)}


def test_the_paper_s_model():
    """method.md 1.5: 46,080 + 5,760 bytes in full, 7,680 + 960 in compact form, outer scales apart.

    40 layers of experts, 10 of attention with K and V of two heads each: 80 outer scales a token.
    """
    outer = 4 * (40 + 10 * 2 * 2)
    assert paper()["codes"]["all"] == 46080 + 5760 + outer
    assert paper()["low1"]["latter_half"] == 7680 + 960 + outer // 2


def test_all_layers_by_syndrome_take_less_than_half_of_them_by_low_bits():
    """2,048 values and the 1,024 of K and V at a quarter of a bit, and the outer scales."""
    assert paper()["syndrome"]["all"] == 40 * 2048 / 32 + 10 * 1024 / 32 + 320
    assert paper()["syndrome"]["all"] < paper()["low1"]["latter_half"] / 2
    assert paper()["syndrome"]["bits"] < 0.32


@pytest.mark.parametrize("encoding", ["codes", "low1", "syndrome"])
def test_the_formula_is_what_a_forward_records(encoding):
    recording = record.recording(encoding, ("*",), "latter_half", SITE_LAYERS, EVERYTHING)

    def forward(key):
        tokens = jnp.zeros((3, 5), jnp.int32)
        params = decoder.init(CFG, key)
        return decoder.forward(params, tokens, CFG, policy=EVERYTHING, records=(recording,))

    (guidance,) = jax.eval_shape(forward, jax.random.key(0)).recorded
    stated = record_bytes.of_recording(recording, CFG, EVERYTHING)
    assert stated == record.bytes_per_token(guidance)
