"""The compiled sampling loop writes cache and record in place: no step copies either of them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from tests.small_model import CFG, DEFAULT
from trace_jax.guidance import record
from trace_jax.guidance.policy import NOTHING
from trace_jax.models import cache, decoder, packing
from trace_jax.rollout.sampler import Sampler

B, P, S = 2, 8, 8192  # S appears in no other shape
# What may yield a whole buffer inside a loop: passing it on, and the scatter that writes a row.
IN_PLACE = {
    "parameter",
    "get-tuple-element",
    "bitcast",
    "scatter",
    "dynamic-update-slice",
    "fusion",
}


@functools.cache
def compiled(layers, quantized, recorded):
    """The compiled sampler at this depth."""
    cfg = dataclasses.replace(CFG, num_layers=layers)
    recording = record.recording("low1", ("*",), "all", layers, quantized) if recorded else None
    sampler = Sampler(cfg, quantized, jnp.dtype("bfloat16"), S - P, (3,), 0, recording)
    packed = jax.eval_shape(
        lambda key: packing.pack(decoder.init(cfg, key), quantized, jnp.dtype("bfloat16")),
        jax.random.key(0),
    )
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    return Sampler.__call__.lower(
        sampler, packed, ints(B, P), ints(B), jax.random.key(0), ints(B), 1.0
    ).compile()


def whole_buffers(text, shapes):
    """Opcodes by which instructions inside loops, and what they call, yield a whole buffer."""
    computations = {
        re.match(r"(?:ENTRY )?%([\w.-]+)", block)[1]: block
        for block in re.split(r"\n(?=%|ENTRY )", text)
        if block.startswith(("%", "ENTRY"))
    }
    pending, inside = re.findall(r"body=%([\w.-]+)", text), set()
    while pending:
        name = pending.pop()
        if name not in inside:
            inside.add(name)
            pending += re.findall(r"(?:body|calls|to_apply)=%([\w.-]+)", computations[name])
    yields = r"= \w+\[([\d,]+)\]\S* ([\w-]+)\("
    found = [pair for name in inside for pair in re.findall(yields, computations[name])]
    return [opcode for shape, opcode in found if tuple(map(int, shape.split(","))) in shapes]


def shapes_and_bytes(layers, quantized):
    cfg = dataclasses.replace(CFG, num_layers=layers)
    leaves = jax.tree.leaves(
        jax.eval_shape(lambda: cache.empty(cfg, quantized, B, S, jnp.dtype("bfloat16")))
    )
    return {leaf.shape for leaf in leaves}, sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize(
    ("quantized", "recorded"), [(DEFAULT, True), (NOTHING, False)], ids=["fp4 recorded", "bf16"]
)
def test_no_step_copies_or_converts_a_buffer(quantized, recorded):
    shapes, _ = shapes_and_bytes(4, quantized)
    if recorded:
        shapes |= record_shapes(4)
    opcodes = whole_buffers(compiled(4, quantized, recorded).as_text(), shapes)
    assert opcodes.count("scatter") >= 4
    assert set(opcodes) <= IN_PLACE


def record_shapes(layers):
    """Of the low bits, block scales and outer scales of the default sites."""
    widths = [(CFG.hidden_size,), (CFG.num_kv_heads, CFG.head_dim), (2, CFG.moe_intermediate_size)]
    rows = [(*w[:-1], w[-1] // 8) for w in widths] + [(*w[:-1], w[-1] // 16) for w in widths]
    return {(layers, B, S, *row) for row in rows} | {(layers, B, S)}


def test_temporaries_grow_by_no_more_than_the_cache_itself():
    """Eight layers more take eight layers more of cache, and hardly anything besides."""
    memory = [compiled(layers, DEFAULT, True).memory_analysis() for layers in (4, 12)]
    caches = [shapes_and_bytes(layers, DEFAULT)[1] for layers in (4, 12)]
    temporaries = [analysis.temp_size_in_bytes for analysis in memory]
    assert temporaries[1] - temporaries[0] < 1.1 * (caches[1] - caches[0])
