"""GGUF files of the Llama architecture: weights, sizes, tokenizer. Made for SmolLM2-135M-Instruct.

    params, cfg = gguf_file.load(path)            # a dense model
    gguf_file.write_tokenizer(path, directory)    # the files that rl.tokenizer reads

llama.cpp rotates neighbouring values of a head, (2c, 2c + 1), and stores the rows of q and k in
that order; here, as in Hugging Face files, pairs are half-split, so the rows are put back.
Quantized tensors are dequantized. Needs the package gguf (requirements-smollm2.txt).
Source: data.md section 3, and the GGUF specification.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from trace_jax.models.architecture import ModelConfig

if TYPE_CHECKING:
    import gguf

PRE_TOKENIZERS = {  # by tokenizer.ggml.pre; ByteLevel splits words as GPT-2 does
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
}
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type: special tokens, further added ones


def load(path: str | Path, dtype: jnp.dtype = jnp.float32) -> tuple[dict, ModelConfig]:
    """(parameters in `dtype`, sizes): a dense model, its layers stacked on a leading axis.

    Raises:
      ImportError: the package gguf is not installed.
      FileNotFoundError: there is no such file.
      ValueError: it is no GGUF file, of another architecture, or holds other tensors than such a
        model has; says which.
    """
    reader = _open(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    cfg = _config(path, _metadata(reader), tensors)
    _check(path, _shapes(cfg), {name: _shape(tensor) for name, tensor in tensors.items()})

    def read(name: str) -> np.ndarray:
        tensor = tensors[f"{name}.weight"]
        values = _package().dequantize(tensor.data, tensor.tensor_type)
        return values.reshape(_shape(tensor)).astype(dtype)

    layers = [_layer(read, f"blk.{layer}", cfg) for layer in range(cfg.num_layers)]
    params = {
        "embed": read("token_embd"),
        "layers_0": {"0": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)},
        "final_norm": {"scale": read("output_norm")},
    }
    if not cfg.tie_embeddings:
        params["head"] = read("output")
    return jax.tree.map(jnp.asarray, params), cfg


def tokenizer(path: str | Path) -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer of a GGUF file.

    Raises ValueError for a tokenizer of another kind, and as `load` does.
    """
    return _tokenizer(path, _metadata(_open(path)))


def write_tokenizer(path: str | Path, directory: str | Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json, as checkpoints have.

    The chat template and the special tokens are the GGUF file's. Raises as `tokenizer` does.
    """
    metadata = _metadata(_open(path))
    directory = Path(directory)
    _tokenizer(path, metadata).save(str(directory / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {
        name: metadata[f"tokenizer.ggml.{key}_token_id"]
        for name, key in SPECIAL_TOKENS.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {f"{name}_token": tokens[i] for name, i in ids.items()}
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    generation = {f"{name}_token_id": i for name, i in ids.items() if name != "unk"}
    for name, fields in (("tokenizer_config", config), ("generation_config", generation)):
        (directory / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n")


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "a GGUF file needs the package gguf; fix: pip install -r requirements-smollm2.txt"
        ) from error
    return gguf


def _open(path: str | Path) -> "gguf.GGUFReader":
    try:
        return _package().GGUFReader(path)
    except ValueError as error:
        raise ValueError(f"{path} is no GGUF file that the package gguf reads: {error}") from error


def _metadata(reader: "gguf.GGUFReader") -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items()}


def _shape(tensor: "gguf.ReaderTensor") -> tuple[int, ...]:
    """As arrays have it; GGUF lists axes from the last to the first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _config(path: str | Path, metadata: Mapping, tensors: Mapping) -> ModelConfig:
    name = metadata.get("general.architecture")
    if name != "llama":
        raise ValueError(f"{path}: general.architecture={name!r}; only 'llama' is read")
    for key in ("llama.rope.scaling.type", "llama.expert_count"):
        if metadata.get(key) not in (None, "none", 0):
            raise ValueError(f"{path}: {key}={metadata[key]!r} is not supported")
    required = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    required = [f"llama.{key}" for key in (*required, "attention.layer_norm_rms_epsilon")]
    missing = [key for key in required if key not in metadata]
    if missing or "token_embd.weight" not in tensors:
        raise ValueError(f"{path}: missing {missing or 'token_embd.weight'}")
    layers, D, F, H, eps = (metadata[key] for key in required)
    C = metadata.get("llama.attention.key_length", D // H)
    return ModelConfig(
        vocab_size=_shape(tensors["token_embd.weight"])[0],
        hidden_size=D,
        num_layers=layers,
        num_heads=H,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", H),
        head_dim=C,
        intermediate_size=F,
        rope_theta=metadata.get("llama.rope.freq_base", 1e4),
        rotary_fraction=metadata.get("llama.rope.dimension_count", C) / C,
        rms_norm_eps=float(str(np.float32(eps))),  # 1e-5, not 9.999999747378752e-06
        qk_norm=False,
        tie_embeddings="output.weight" not in tensors,
    )


def _shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of such a model."""
    V, D, F = cfg.vocab_size, cfg.hidden_size, cfg.intermediate_size
    queries, keys = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    layer = {
        "attn_norm": (D,), "attn_q": (queries, D), "attn_k": (keys, D), "attn_v": (keys, D),
        "attn_output": (D, queries), "ffn_norm": (D,), "ffn_gate": (F, D), "ffn_up": (F, D),
        "ffn_down": (D, F),
    }  # fmt: skip
    shapes = {"token_embd": (V, D), "output_norm": (D,)}
    if not cfg.tie_embeddings:
        shapes["output"] = (V, D)
    for i in range(cfg.num_layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _check(path: str | Path, expected: Mapping, found: Mapping) -> None:
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "misshapen": [
            f"{name} {found[name]}, not {shape}"
            for name, shape in expected.items()
            if found.get(name, shape) != shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {names}" for kind, names in problems.items() if names)
        raise ValueError(f"{path}: not the tensors of its sizes. {listed}")


def _layer(read: Callable[[str], np.ndarray], layer: str, cfg: ModelConfig) -> dict:
    """One layer's parameters."""
    gate_up = [read(f"{layer}.ffn_gate"), read(f"{layer}.ffn_up")]
    return {
        "input_norm": {"scale": read(f"{layer}.attn_norm")},
        "attention": {
            "q": half_split(read(f"{layer}.attn_q"), cfg.num_heads, cfg.rotary_dim),
            "k": half_split(read(f"{layer}.attn_k"), cfg.num_kv_heads, cfg.rotary_dim),
            "v": read(f"{layer}.attn_v"),
            "o": read(f"{layer}.attn_output"),
        },
        "post_attention_norm": {"scale": read(f"{layer}.ffn_norm")},
        "mlp": {"gate_up": np.concatenate(gate_up), "down": read(f"{layer}.ffn_down")},
    }


def half_split(w_FD: np.ndarray, heads: int, rotary_dim: int) -> np.ndarray:
    """Rows of heads whose rotating pairs are neighbours, with the pairs half-split."""
    F, D = w_FD.shape
    w_HCD = w_FD.reshape(heads, F // heads, D)
    turning, still = w_HCD[:, :rotary_dim], w_HCD[:, rotary_dim:]
    turning = np.concatenate([turning[:, 0::2], turning[:, 1::2]], axis=1)
    return np.concatenate([turning, still], axis=1).reshape(F, D)


def _tokenizer(path: str | Path, metadata: Mapping) -> tokenizers.Tokenizer:
    kind, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: tokenizer.ggml.model={kind!r} with pre={pre!r}; read are byte-level BPE "
            f"tokenizers ('gpt2') with pre one of {sorted(PRE_TOKENIZERS)}"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    made.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind in (CONTROL, USER_DEFINED):
            made.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    return made
