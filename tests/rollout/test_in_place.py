"""The compiled sampling loop writes cache and record in place: no step copies either of them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp

from tests.small_model import CFG, SITES, UNOPTIMIZED
from trace_jax.guidance import policy, record
from trace_jax.models import architecture, cache, decoder, packing
from trace_jax.rollout.sampler import Sampler

B, P, S = 2, 8, 8192  # S appears in no other shape
K_IN_BF16 = [("experts/*", "nvfp4"), ("attention/v", "nvfp4")]
CACHED = policy.resolve(K_IN_BF16, SITES)
DTYPE = jnp.dtype("bfloat16")
# What may yield a whole buffer inside a loop: passing it on, and the scatter that writes a row.
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "scatter", "fusion"}


@functools.cache
def compiled(layers):
    """The compiled sampler at this depth."""
    cfg = dataclasses.replace(CFG, num_layers=layers)
    recording = record.recording("low1", ("*",), "all", architecture.site_layers(cfg), CACHED)
    sampler = Sampler(cfg, CACHED, DTYPE, S - P, (3,), 0, recording)
    packed = jax.eval_shape(
        lambda key: packing.pack(decoder.init(cfg, key), CACHED, DTYPE), jax.random.key(0)
    )
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    return Sampler.__call__.lower(
        sampler, packed, ints(B, P), ints(B), jax.random.key(0), ints(B), 1.0
    ).compile(UNOPTIMIZED)  # of the machine code; what is looked at comes before it


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


def cache_leaves(layers):
    """Shapes and dtypes of the cache's arrays."""
    cfg = dataclasses.replace(CFG, num_layers=layers)
    return jax.tree.leaves(jax.eval_shape(lambda: cache.empty(cfg, CACHED, B, S, DTYPE)))


def record_shapes(layers):
    """Of the low bits, block scales and outer scales of the recorded sites."""
    widths = [(CFG.hidden_size,), (CFG.num_kv_heads, CFG.head_dim), (2, CFG.moe_intermediate_size)]
    rows = [(*w[:-1], w[-1] // 8) for w in widths] + [(*w[:-1], w[-1] // 16) for w in widths]
    return {(layers, B, S, *row) for row in [*rows, (), (2,)]}


def test_no_step_copies_or_converts_a_buffer():
    """FP4 and BF16 cache, low bits, scales and routes: rows are scattered into them, no more."""
    shapes = {leaf.shape for leaf in cache_leaves(4)} | record_shapes(4)
    opcodes = whole_buffers(compiled(4).as_text(), shapes)
    buffers = 1 + 3 + 3 * 3 + 1  # K; V; a Guide of each site; routes
    assert opcodes.count("scatter") >= buffers
    assert set(opcodes) <= IN_PLACE


def test_temporaries_grow_by_no_more_than_the_cache_itself():
    """Eight layers more take eight layers more of cache, and hardly anything besides."""
    temporaries = [compiled(n).memory_analysis().temp_size_in_bytes for n in (4, 12)]
    caches = [sum(leaf.size * leaf.dtype.itemsize for leaf in cache_leaves(n)) for n in (4, 12)]
    assert temporaries[1] - temporaries[0] < 1.1 * (caches[1] - caches[0])
