"""Compile time against depth, and the memory of a decode step against the sum of its buffers.

    python -m experiments.depth

Layers are scanned, so 32 must compile in about the time of 4; the cache is written in place, so the
temporaries of a step are one layer's keys and values unpacked, whatever the depth.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp

from trace_jax.guidance import policy, record
from trace_jax.models import architecture, cache, config, decoder, packing

CFG = config.tiny(config.get("qwen3_30b_a3b"))
QUANTIZED = policy.resolve(
    [("experts/*", "nvfp4"), ("attention/[kv]", "nvfp4")], architecture.sites(CFG)
)
DTYPE = jnp.dtype("bfloat16")
B, T, S = 8, 64, 4096  # sequences, tokens trained on, positions cached


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """int32 of a shape, nothing allocated."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def masters(cfg: config.ModelConfig) -> dict:
    """Shapes of the parameters."""
    return jax.eval_shape(lambda key: decoder.init(cfg, key), jax.random.key(0))


def train_gradient(cfg: config.ModelConfig) -> tuple:
    """The gradient of a guided forward, and its arguments."""
    kept = record.recording("low1", ("*",), "latter_half", architecture.site_layers(cfg), QUANTIZED)

    def forward(params, tokens_BT, **follow):
        return decoder.forward(params, tokens_BT, cfg, policy=QUANTIZED, dtype=DTYPE, **follow)

    def loss(params, tokens_BT, guidance, routes_LBTA):
        return jnp.mean(
            forward(params, tokens_BT, guidance=guidance, routes_LBTA=routes_LBTA).logits
        )

    recorded = jax.eval_shape(lambda *a: forward(*a, records=(kept,)), masters(cfg), ints(B, T))
    return jax.grad(loss), (masters(cfg), ints(B, T), recorded.recorded[0], recorded.routes_LBTA)


def decode_step(cfg: config.ModelConfig) -> tuple:
    """One token through a long FP4 cache, and its arguments, the cache first."""

    def step(kv, packed, token_B1, position_B1):
        out = decoder.forward(
            packed, token_B1, cfg, policy=QUANTIZED, dtype=DTYPE, positions_BT=position_B1, cache=kv
        )
        return out.cache, out.logits

    packed = jax.eval_shape(lambda params: packing.pack(params, QUANTIZED, DTYPE), masters(cfg))
    kv = jax.eval_shape(lambda: cache.empty(cfg, QUANTIZED, B, S, DTYPE))
    return step, (kv, packed, ints(B, 1), ints(B, 1))


def compiled(function, arguments: tuple, **options) -> tuple[float, float, jax.stages.Compiled]:
    """Seconds to trace, seconds to compile, the program."""
    start = time.perf_counter()
    lowered = jax.jit(function, **options).lower(*arguments)
    traced = time.perf_counter()
    program = lowered.compile()
    return traced - start, time.perf_counter() - traced, program


def main() -> None:
    """Prints both tables."""
    print("| program | layers | trace (s) | compile (s) |\n|---|---|---|---|")
    memory = []
    for name, make in (("train gradient", train_gradient), ("decode step", decode_step)):
        for layers in (4, 32):
            function, arguments = make(dataclasses.replace(CFG, num_layers=layers))
            donated = {"donate_argnums": 0} if make is decode_step else {}
            trace_s, compile_s, program = compiled(function, arguments, **donated)
            print(f"| {name} | {layers} | {trace_s:.1f} | {compile_s:.1f} |")
            if donated:
                leaves = jax.tree.leaves(arguments[0])
                kv = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
                memory.append((layers, kv, program.memory_analysis()))
    mib = lambda size: f"{size / 2**20:.2f}"
    print("\nDecode step, MiB; peak = arguments + outputs - aliased + temporaries.\n")
    print("| layers | cache | arguments | outputs | aliased | temporaries | peak | peak / cache |")
    print("|---|---|---|---|---|---|---|---|")
    for layers, kv, m in memory:
        sizes = (m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes)
        peak = sizes[0] + sizes[1] - sizes[2] + m.temp_size_in_bytes
        row = " | ".join(map(mib, (kv, *sizes, m.temp_size_in_bytes, peak)))
        print(f"| {layers} | {row} | {peak / kv:.2f} |")


if __name__ == "__main__":
    main()
