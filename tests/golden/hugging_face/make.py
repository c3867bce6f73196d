"""Writes the golden files beside it: what transformers computes on tiny checkpoints of each family.

    python tests/golden/hugging_face/make.py [--only=CASE]

Needs torch (CPU) and transformers 5.24.0, which nothing else here does. README.md beside it
describes the files.
"""

import argparse
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
import transformers
import weights

HERE = Path(__file__).parent
NEW_TOKENS = 6
NOISE = 1.5e-5  # of a golden logit, by rounding
MARGIN = 1e-4  # between what top-k takes and what it leaves

MOE = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=32)
HYBRID = MOE | dict(
    vocab_size=64, num_hidden_layers=4, head_dim=32, num_experts=8, num_experts_per_tok=3,
    shared_expert_intermediate_size=40, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=24,
)  # fmt: skip
ODD = HYBRID | dict(
    vocab_size=80, hidden_size=56, num_hidden_layers=5, num_attention_heads=6, head_dim=24,
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20,
    shared_expert_intermediate_size=36, linear_num_value_heads=6, linear_key_head_dim=20,
    linear_value_head_dim=12, rms_norm_eps=1e-5,
)  # fmt: skip
STREAMS = dict(
    hc_count=4, hc_lowrank=12, ple_layer_ids=[2], ple_embed_dim=32, heads_per_ngram=2,
    ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=3,
    indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
    indexer_compress_ratio=4, output_gate_type="sigmoid", eos_token_id=7,
)  # fmt: skip
VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, num_position_embeddings=4,
    patch_size=2,
)  # fmt: skip


def rotary(theta: float, fraction: float | None = None) -> dict:
    """The config's rope_parameters."""
    given = dict(rope_type="default", rope_theta=theta)
    return dict(rope_parameters=given | ({"partial_rotary_factor": fraction} if fraction else {}))


# name: (class, config, seed, shape of the tokens, whether to add the keys of an MTP block)
CASES = {
    "qwen3_moe_a": (
        "Qwen3Moe", MOE | dict(
            vocab_size=64, num_hidden_layers=2, head_dim=32, num_experts=8, num_experts_per_tok=3,
            norm_topk_prob=True,
        ) | rotary(1e4), 1, (2, 16), False,
    ),
    "qwen3_moe_b": (  # no head_dim, tied, weights of the experts not renormalised
        "Qwen3Moe", dict(
            vocab_size=80, hidden_size=48, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20,
            tie_word_embeddings=True,
        ) | rotary(1e6), 2, (1, 24), False,
    ),
    "qwen3_next_a": ("Qwen3Next", HYBRID, 3, (2, 20), True),
    "qwen3_next_b": (
        "Qwen3Next", ODD | dict(norm_topk_prob=False) | rotary(1e7, 0.5), 4, (1, 28), False,
    ),
    "qwen3_5_moe_flat_a": ("Qwen3_5MoeText", HYBRID | rotary(1e7, 0.25), 5, (2, 20), True),
    "qwen3_5_moe_flat_b": (
        "Qwen3_5MoeText", HYBRID | dict(
            vocab_size=96, hidden_size=40, num_hidden_layers=8, num_key_value_heads=1, head_dim=16,
            linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=24,
            linear_value_head_dim=16, num_experts=5, num_experts_per_tok=1,
        ) | rotary(1e5, 0.5), 6, (1, 40), False,
    ),
    "qwen3_5_moe_irregular": (  # attention in no regular place
        "Qwen3_5MoeText", HYBRID | dict(
            layer_types=[f"{kind}_attention" for kind in "full linear full".split()],
            num_hidden_layers=3, hidden_size=48,
        ) | rotary(1e6, 0.75), 15, (1, 20), False,
    ),
    "qwen3_5_moe_nested": (
        "Qwen3_5Moe", dict(text_config=ODD, vision_config=VISION | dict(out_hidden_size=56)),
        7, (2, 18), True,
    ),
    "qwen4_exp_flat_a": ("Qwen4ExpText", HYBRID | STREAMS | rotary(1e4, 0.25), 8, (2, 30), True),
    "qwen4_exp_flat_b": (  # all of each head rotates, gate of hidden_act, shards of unequal rows
        "Qwen4ExpText", ODD | STREAMS | dict(
            num_hidden_layers=6, hc_count=3, hc_lowrank=10, ple_layer_ids=[3], ngram_size=4,
            heads_per_ngram=1, ple_embed_dim=24, ple_conv_kernel_size=3, ngram_vocab_size_base=31,
            make_ngram_vocab_size_divisible_by=1, split_ngram_parts=4, seed=77, indexer_n_heads=6,
            indexer_head_dim=28, indexer_budget=6, indexer_compress_ratio=2, norm_topk_prob=False,
            output_gate_type=None, eos_token_id=[5, 9],
        ), 9, (1, 40), False,
    ),
    "qwen4_exp_two_ngrams": (  # the second table has primes and multipliers of its own
        "Qwen4ExpText", HYBRID | STREAMS | dict(ple_layer_ids=[1, 3], hc_count=2)
        | rotary(1e4, 0.5), 10, (1, 24), False,
    ),
    "qwen4_exp_nested": (
        "Qwen4Exp", dict(
            text_config=HYBRID | STREAMS | dict(num_hidden_layers=8, indexer_budget=12)
            | rotary(1e7, 0.25),
            vision_config=VISION | dict(out_hidden_size=64),
        ), 11, (1, 36), True,
    ),
    "qwen3_dense": (
        "Qwen3", dict(
            vocab_size=64, hidden_size=40, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, intermediate_size=56, tie_word_embeddings=True,
        ) | rotary(1e6), 12, (1, 16), False,
    ),
    "llama_tied": (
        "Llama", dict(
            vocab_size=72, hidden_size=36, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=3, intermediate_size=44, tie_word_embeddings=True,
            rms_norm_eps=1e-5,
        ) | rotary(1e5), 13, (1, 16), False,
    ),
    "llama": (
        "Llama", dict(
            vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=24, intermediate_size=48,
        ) | rotary(1e4), 14, (2, 12), False,
    ),
}  # fmt: skip


def main() -> None:
    """Makes every case, or the one named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES)
    only = parser.parse_args().only
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    for name in [only] if only else CASES:
        make(name)


def make(name: str) -> None:
    """Writes NAME.json and NAME.npz."""
    family, given, seed, shape, mtp = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        model = _class(family)(getattr(transformers, f"{family}Config")(**given))
        model.save_pretrained(directory)
        config = json.loads(Path(directory, "config.json").read_text())
        saved = safetensors.numpy.load_file(Path(directory, "model.safetensors"))
        shapes = {key: list(value.shape) for key, value in saved.items() if value.dtype == "f4"}
        integers = {key: value.tolist() for key, value in saved.items() if value.dtype == "i8"}
        assert len(shapes) + len(integers) == len(saved)
        case = dict(shapes=shapes | (_mtp(shapes) if mtp else {}), integers=integers)
        for case["seed"] in range(seed, seed + 2000, 100):
            split = weights.tensors(case)
            runs = split, weights.fused(split), _shaken(split)
            try:
                runs = [_run(family, directory, run, shape, config, case["seed"]) for run in runs]
                found = _agreed(*runs)
                break
            except Close as close:
                print(f"{name}: {close}; another seed")
        else:
            raise Close(f"{name}: every seed")
    np.savez_compressed(HERE / f"{name}.npz", **found)
    case = dict(config=config) | case
    lists_on_one_line = lambda found: json.dumps(json.loads(found.group()))
    text = re.sub(r"\[[^\[\]]*\]", lists_on_one_line, json.dumps(case, indent=1))
    (HERE / f"{name}.json").write_text(text + "\n")
    size = sum((HERE / f"{name}{end}").stat().st_size for end in (".json", ".npz"))
    print(f"{name}: largest logit {np.abs(found['logits_BTV']).max():.2f}, {size / 1024:.0f} KiB")


def _shaken(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights moved by rounding: up to one unit in float32's last place."""
    random = np.random.default_rng(0)

    def shake(value):
        draw = random.integers(-1, 2, value.shape, dtype=np.int32)
        return (value.view(np.int32) + draw).view(np.float32) if value.dtype == "f4" else value

    return {name: shake(value) for name, value in tensors.items()}


def _agreed(first: dict, *others: dict) -> dict:
    """The first run. Raises Close where rounding weighs so much that others differ."""
    for other in others:
        for key, value in first.items():
            if (noise := np.abs(value - other[key]).max()) > NOISE:
                raise Close(f"{key} moves by {noise:.0e}")
    return first


def _class(family: str) -> type:
    nested = family in ("Qwen3_5Moe", "Qwen4Exp")
    name = family.removesuffix("Text") + ("ForConditionalGeneration" if nested else "ForCausalLM")
    return getattr(transformers, name)


def _mtp(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Keys of a multi-token prediction block, which save_pretrained does not write."""
    hidden = next(shape for key, shape in shapes.items() if key.endswith("embed_tokens.weight"))[1]
    layer = next(key for key in shapes if key.endswith("self_attn.q_proj.weight"))
    layer = layer.removesuffix("self_attn.q_proj.weight")
    block = {
        f"mtp.layers.0.{key.removeprefix(layer)}": shape
        for key, shape in shapes.items()
        if key.startswith(layer)
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    block |= {f"mtp.{norm}.weight": [hidden] for norm in norms}
    return block | {"mtp.fc.weight": [hidden, 2 * hidden]}


def _run(family: str, directory: str, tensors: dict, shape: tuple, config: dict, seed: int) -> dict:
    """Tokens, logits, and a greedy continuation through transformers' cache."""
    safetensors.numpy.save_file(tensors, Path(directory, "model.safetensors"), {"format": "pt"})
    model, report = _class(family).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager", output_loading_info=True,
    )  # fmt: skip
    assert not any(report.values()), report
    model.eval()
    text = config.get("text_config", config)
    tokens = np.random.default_rng(seed).integers(0, text["vocab_size"], shape)
    if text.get("ple_layer_ids"):  # ends of sequence, one pair in a row
        eos = text["eos_token_id"]
        tokens[:, [5, 11, 12]] = eos[0] if isinstance(eos, list) else eos
    with torch.no_grad(), Margins(model, active=bool(text.get("indexer_budget"))):
        logits = model(input_ids=torch.tensor(tokens), use_cache=False).logits
        step = model(input_ids=torch.tensor(tokens), use_cache=True)
        if (noise := (step.logits - logits).abs().max()) > NOISE:
            raise Close(f"prefill of the cache moves logits by {noise:.0e}")
        new, new_logits = [], []
        for _ in range(NEW_TOKENS):
            last = step.logits[:, -1]
            best = last.topk(2).values
            if (gap := (best[:, 0] - best[:, 1]).min()) < 1e-2:
                raise Close(f"greedy tokens are {gap:.0e} apart")
            new_logits.append(last.numpy())
            new.append(last.argmax(-1))
            step = model(input_ids=new[-1][:, None], cache=step.cache, use_cache=True)
    return dict(
        tokens_BT=tokens.astype(np.int32),
        logits_BTV=logits.numpy(),
        new_tokens_BN=torch.stack(new, 1).numpy().astype(np.int32),
        new_logits_BNV=np.stack(new_logits, 1),
    )


class Close(Exception):
    """A choice that rounding could turn."""


class Margins:
    """Watches the choices of experts and of blocks while open: none may be close to a tie."""

    def __init__(self, model: torch.nn.Module, active: bool):
        self.routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        self.active, self.left_out = active, 0

    def __enter__(self) -> None:
        self.topk = torch.Tensor.topk

        def router(module, _, output):
            self.check(output[0], module.top_k)

        def indexer(scores, k, dim=-1):
            if scores.ndim == 1:  # those of one query
                self.left_out += self.check(scores, k)
            return self.topk(scores, k, dim)

        self.hooks = [module.register_forward_hook(router) for module in self.routers]
        torch.Tensor.topk = indexer

    def __exit__(self, kind, *_) -> None:
        torch.Tensor.topk = self.topk
        for hook in self.hooks:
            hook.remove()
        assert kind or self.left_out or not self.active, "no query leaves a block out"

    def check(self, scores: torch.Tensor, k: int) -> bool:
        """Whether the choice leaves anything out."""
        if k >= scores.shape[-1]:
            return False
        best = self.topk(scores, k + 1).values
        gap = (best[..., k - 1] - best[..., k]).min()
        if gap < MARGIN:
            raise Close(f"top {k} of {scores.shape[-1]} is chosen by {gap:.0e}")
        return True


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
