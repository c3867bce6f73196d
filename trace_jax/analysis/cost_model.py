"""Decode speed from floors: no step is faster than its bytes, its FLOPs or its exchange allow.

Sizes come from `coverage`, thus from the shapes of what a rollout holds. All chips are assumed to
share every byte and every product evenly, and nothing else takes time: latency, imbalance between
experts and kernels' losses are absent, so a real rollout is slower. Guidance counts as written to
memory, K and V as read once a step, packed weights as read packed (`Sampler.unpack_once=False`).
"""

import dataclasses

import numpy as np

from trace_jax.analysis import coverage as coverages
from trace_jax.analysis import record_bytes
from trace_jax.guidance.policy import NOTHING, Policy
from trace_jax.guidance.record import Recording
from trace_jax.models import architecture
from trace_jax.models.architecture import ATTENTION, ModelConfig

MEMORY_SHARE = 0.9  # of a chip's memory that weights, cache and records may take
LENGTHS = tuple(1024 * 2**i for i in range(9))  # output tokens: 1K to 256K
STEPS = 64  # positions at which a rollout's step time is sampled
BF16_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Chip:
    """Public peak figures of one chip, dense (no sparsity)."""

    memory: float  # bytes
    bandwidth: float  # of memory, bytes/s
    bf16: float  # FLOP/s
    link: float  # to other chips, bytes/s in one direction, all links together
    fp4: float | None = None  # FLOP/s; None: FP4 is dequantized and multiplied in BF16


# GPU memory and bandwidth: XLA's target descriptions. The others are the vendors' round peaks,
# set down without the data sheets at hand: compare with yours. tpu7x: a chip of two devices.
CHIPS = {
    "v5e": Chip(16 * 2**30, 819e9, 197e12, 200e9),
    "v5p": Chip(95 * 2**30, 2765e9, 459e12, 600e9),
    "v6e": Chip(32 * 2**30, 1638e9, 918e12, 400e9),
    "tpu7x": Chip(192 * 2**30, 7380e9, 2307e12, 600e9),
    "h100": Chip(84942979072, 3352.32e9, 989e12, 450e9),
    "h200": Chip(151397597184, 4800e9, 989e12, 450e9),
    "b200": Chip(191514411008, 7672.32e9, 2250e12, 900e9, fp4=9000e12),
}


def chip(name: str) -> Chip:
    """The named Chip. Raises ValueError listing the choices."""
    if name not in CHIPS:
        raise ValueError(f"chip {name!r} is unknown: choose one of {sorted(CHIPS)}")
    return CHIPS[name]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes and FLOPs of a rollout that decide its speed; those of a token are over all layers."""

    weight_bytes: int  # all that is held
    dense_bytes: int  # weights that every step reads whole
    routed_bytes: int  # weights of all routed experts
    experts: int  # of a layer; 0: dense model
    experts_per_token: int
    row_bytes: int  # rows a token looks up: embedding, n-grams
    kv_bytes: int  # K and V a token, scales included
    index_bytes: int  # index keys a token (sparse attention)
    budget: int | None  # tokens that sparse attention reads K and V of; None: all
    state_bytes: int  # recurrent state and tails of a sequence
    guidance_bytes: int  # recorded a token, routes included
    exchange_bytes: int  # a token's activations to its experts and back
    flops_bf16: int  # a token, but for attention's products
    flops_fp4: int  # a token: products whose operands are both FP4
    flops_per_position: int  # a token, for each position attended

    def held(self, batch: int, length: int) -> int:
        """Bytes in memory of `batch` sequences of `length` tokens, and of the weights."""
        token = self.kv_bytes + self.index_bytes + self.guidance_bytes
        return self.weight_bytes + batch * (self.state_bytes + length * token)


def sizes(policy: Policy, cfg: ModelConfig, recording: Recording | None = None) -> Sizes:
    """The Sizes of a rollout under `policy` that keeps `recording`, and routes with it."""
    of = coverages.coverage(policy, cfg, kv_length=1)
    part = {p.name: p for p in of.parts}
    bytes_of = lambda names: sum(part[name].weight_bytes for name in names if name in part)
    routed = bytes_of(("experts/in", "experts/mid"))
    looked_up = bytes_of(("n-gram table",) if cfg.tie_embeddings else ("n-gram table", "embedding"))
    scores = sum(part[name].flops for name in ("attention/k", "attention/v") if name in part)
    weight_products = [p for p in of.parts if p.name not in ("attention/k", "attention/v")]
    fp4 = sum(p.flops for p in weight_products if p.weight_bytes and p.in_fp4("flops"))
    layers = len(architecture.layers_with(cfg, ATTENTION))
    index = BF16_BYTES * layers * cfg.indexer.head_dim if cfg.indexer else 0
    ngram = cfg.ngram.heads * cfg.ngram.row_width * len(cfg.ngram.layers) if cfg.ngram else 0
    routes = cfg.num_layers * cfg.num_experts_per_token * (1 if cfg.num_experts <= 256 else 2)
    return Sizes(
        weight_bytes=of.total("weight_bytes"),
        dense_bytes=of.total("weight_bytes") - routed - looked_up,
        routed_bytes=routed,
        experts=cfg.num_experts,
        experts_per_token=cfg.num_experts_per_token,
        row_bytes=BF16_BYTES * (cfg.hidden_size + ngram),
        kv_bytes=of.kv_bytes_per_token - index,
        index_bytes=index,
        budget=cfg.indexer.budget if cfg.indexer else None,
        state_bytes=of.state_bytes,
        guidance_bytes=record_bytes.of_recording(recording, cfg, policy) + routes
        if recording
        else 0,
        exchange_bytes=2
        * BF16_BYTES
        * cfg.num_layers
        * cfg.num_experts_per_token
        * cfg.hidden_size,
        flops_bf16=of.total("flops") - scores - fp4,
        flops_fp4=fp4,
        flops_per_position=scores,
    )


def distinct_share(experts: int, experts_per_token: int, batch: int) -> float:
    """The share of a layer's experts that a batch is expected to reach, chosen uniformly."""
    return 1 - (1 - experts_per_token / experts) ** batch if experts else 0.0


def step_bytes(of: Sizes, batch: int, attended: int) -> dict[str, float]:
    """Bytes moved by one decode step, by class: read, and state and guidance written."""
    read = attended if of.budget is None else min(attended, of.budget)
    share = distinct_share(of.experts, of.experts_per_token, batch)
    return {
        "dense weights": of.dense_bytes + batch * of.row_bytes,
        "experts": of.routed_bytes * share,
        "kv": batch * (read * of.kv_bytes + attended * of.index_bytes),
        "state": 2 * batch * of.state_bytes,
        "guidance": batch * of.guidance_bytes,
    }


def step_seconds(of: Sizes, on: Chip, chips: int, batch: int, attended: int) -> dict[str, float]:
    """The floors of one decode step, seconds: memory, compute and link. The largest holds."""
    read = attended if of.budget is None else min(attended, of.budget)
    bf16 = batch * (of.flops_bf16 + read * of.flops_per_position)
    products = bf16 / on.bf16 + batch * of.flops_fp4 / (on.fp4 or on.bf16)
    away = 1 - 1 / chips  # of the experts, on other chips
    return {
        "memory": sum(step_bytes(of, batch, attended).values()) / (chips * on.bandwidth),
        "compute": products / chips,
        "link": batch * of.exchange_bytes * away / (chips * on.link),
    }


def tokens_per_second(
    of: Sizes, on: Chip, chips: int, batch: int, prompt: int, length: int
) -> float:
    """Decoded tokens/s of a batch, averaged over an output of `length` tokens: an upper bound."""
    at = prompt + (np.arange(STEPS) + 0.5) * length / STEPS
    seconds = [max(step_seconds(of, on, chips, batch, n).values()) for n in at]
    return batch / float(np.mean(seconds))


def largest_batch(of: Sizes, on: Chip, chips: int, length: int) -> int:
    """Sequences of `length` tokens that fit beside the weights; 0 where not one does."""
    room = MEMORY_SHARE * chips * on.memory - of.weight_bytes
    return max(0, int(room // (of.held(1, length) - of.weight_bytes)))


def largest_length(of: Sizes, on: Chip, chips: int, batch: int) -> int:
    """Tokens a sequence, prompt and output, with which `batch` sequences fit; 0 where none do."""
    token = of.held(1, 1) - of.held(1, 0)
    room = MEMORY_SHARE * chips * on.memory - of.held(batch, 0)
    return max(0, int(room // (batch * token)))


def speed_up(
    cfg: ModelConfig,
    policy: Policy,
    recording: Recording | None,
    on: Chip,
    chips: int,
    batch: int,
    prompt: int,
    lengths: tuple[int, ...] = LENGTHS,
) -> list[dict]:
    """FP4 over BF16, a row for each output length.

    "same" is tokens/s over tokens/s at `batch`, fitting or not; "largest" at the largest batch that
    fits each, None where BF16 or FP4 does not fit.
    """
    bf16, fp4 = sizes(NOTHING, cfg), sizes(policy, cfg, recording)
    rows = []
    for n in lengths:
        speed = lambda of, b, n=n: tokens_per_second(of, on, chips, b, prompt, n)
        most = [largest_batch(of, on, chips, prompt + n) for of in (bf16, fp4)]
        both = speed(fp4, most[1]) / speed(bf16, most[0]) if all(most) else None
        rows.append(
            {
                "length": n,
                "bf16_tokens_per_s": speed(bf16, batch),
                "fp4_tokens_per_s": speed(fp4, batch),
                "same": speed(fp4, batch) / speed(bf16, batch),
                "bf16_batch": most[0],
                "fp4_batch": most[1],
                "largest": both,
            }
        )
    return rows
