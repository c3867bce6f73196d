"""The weights of the golden checkpoints: drawn from each tensor's name, so that no file holds them.

`make.py` gives them to transformers, `tests/models/test_against_transformers.py` to our loader.
"""

import hashlib
import math
import re

import numpy as np


def tensors(case: dict) -> dict[str, np.ndarray]:
    """Every tensor of a case's checkpoint, named and shaped as save_pretrained writes it.

    float32, and int64 for the n-gram buffers. The float32 values are exact in BF16.
    """
    drawn = {name: draw(name, tuple(shape), case["seed"]) for name, shape in case["shapes"].items()}
    integers = {name: np.asarray(values, np.int64) for name, values in case["integers"].items()}
    return drawn | integers


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Uniform float32 values in the range that suits the tensor's name, with BF16's precision."""
    low, high = _range(name, shape)
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16])
    # Raw bits: numpy keeps their stream for ever, that of its distributions it may change.
    bits = np.random.Philox(key=key).random_raw(math.prod(shape))
    values = low + (high - low) * (bits >> np.uint64(40)).astype(np.float64) / 2**24
    coarse = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return coarse.view(np.float32).reshape(shape)


def fused(split: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same checkpoint in the other layout: the experts of a layer in two tensors."""
    expert = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    found, rest = {}, {}
    for name, value in split.items():
        if match := expert.fullmatch(name):
            experts, number, part = match.groups()
            found.setdefault(experts, {})[part, int(number)] = value
        else:
            rest[name] = value
    for experts, parts in found.items():
        gate, up, down = (
            np.stack([parts[part, number] for number in range(len(parts) // 3)])
            for part in ("gate", "up", "down")
        )
        rest[f"{experts}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        rest[f"{experts}.down_proj"] = down
    return rest


def _range(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Norm scales that differ, a decay that forgets neither all nor nothing, spread logits."""
    if name.endswith("A_log"):
        return -3.0, 1.0
    if name.endswith("dt_bias"):
        return -2.0, 2.0
    if "norm" in name:
        return -0.6, 0.6
    gains = {
        "linear_attn.conv1d": 4.0,  # q and k nearly positive, their products off 0
        "embed_tokens": math.sqrt(shape[-1]),
        "ngram_embedding": math.sqrt(shape[-1]),
        "lm_head": 2.0,
        "mlp.gate.": 2.0,
        "mix_weight_down": 4.0,  # divided by the number of streams, as is the next
        "block_inject": 4.0,
    }
    gain = next((gain for part, gain in gains.items() if part in name), 1.0)
    bound = gain * math.sqrt(3 / shape[-1])
    return -bound, bound
