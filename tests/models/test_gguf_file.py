"""A small GGUF file, written here, against the arithmetic that llama.cpp does on its tensors."""

import json

import jax
import numpy as np
import pytest

from tests.models.reference import softmax
from trace_jax.models import decoder, gguf_file
from trace_jax.rl.tokenizer import CheckpointTokenizer

gguf = pytest.importorskip("gguf", reason="pip install -r requirements-smollm2.txt")

V, D, L, H, K, C, F, THETA, EPS = 24, 32, 2, 4, 2, 8, 64, 1e3, 1e-5
SHAPES = {
    "attn_norm": (D,), "attn_q": (H * C, D), "attn_k": (K * C, D), "attn_v": (K * C, D),
    "attn_output": (D, H * C), "ffn_norm": (D,), "ffn_gate": (F, D), "ffn_up": (F, D),
    "ffn_down": (D, F),
}  # fmt: skip
LETTERS = [*"0123456789ab+?", "Ġ", "Ċ", "Ã", "©", "ab", "Ġab"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "<think>"]
TEMPLATE = "{{ '<|im_start|>' + messages[0].content + '<|im_end|>' }}"
METADATA = {
    "llama.block_count": L,
    "llama.embedding_length": D,
    "llama.feed_forward_length": F,
    "llama.attention.head_count": H,
    "llama.attention.head_count_kv": K,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
}


def random_tensors(tied=True):
    rng = np.random.default_rng(0)
    shapes = {f"blk.{i}.{name}": shape for i in range(L) for name, shape in SHAPES.items()}
    shapes |= {"token_embd": (V, D), "output_norm": (D,)} | ({} if tied else {"output": (V, D)})
    return {f"{n}.weight": rng.normal(0, 0.4, s).astype(np.float32) for n, s in shapes.items()}


def write(path, tensors, architecture="llama", kinds=None, strings=None):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in METADATA.items():
        writer.add_uint32(key, value)
    writer.add_float32("llama.rope.freq_base", THETA)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", EPS)
    tokenizer = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, value in (tokenizer | {"tokenizer.chat_template": TEMPLATE} | (strings or {})).items():
        writer.add_string(key, value)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", [3] * 3 + [1] * len(LETTERS) + [4])
    writer.add_array("tokenizer.ggml.merges", ["a b", "Ġ ab"])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def norm(x_TD, scale_D):
    return scale_D * x_TD / np.sqrt(np.mean(x_TD**2, axis=-1, keepdims=True) + EPS)


def rotate(x_C, position):
    """llama.cpp's order: the pair of frequency c is (2c, 2c + 1)."""
    z = x_C[0::2] + 1j * x_C[1::2]
    z = z * np.exp(1j * position * THETA ** (-2 * np.arange(C // 2) / C))
    return np.stack([z.real, z.imag], axis=-1).ravel()


def logits(tensors, tokens_T):
    w = {name.removesuffix(".weight"): np.float64(tensor) for name, tensor in tensors.items()}
    x_TD = w["token_embd"][tokens_T]
    for layer in range(L):
        p = {name: w[f"blk.{layer}.{name}"] for name in SHAPES}
        n_TD = norm(x_TD, p["attn_norm"])
        q_THC, k_TKC, v_TKC = (
            (n_TD @ p[f"attn_{name}"].T).reshape(len(x_TD), -1, C) for name in "qkv"
        )
        y_THC = np.zeros((len(x_TD), H, C))
        for t, h in np.ndindex(len(x_TD), H):
            k_SC = np.stack([rotate(k_TKC[s, h * K // H], s) for s in range(t + 1)])
            probability_S = softmax(k_SC @ rotate(q_THC[t, h], t) / np.sqrt(C))
            y_THC[t, h] = probability_S @ v_TKC[: t + 1, h * K // H]
        x_TD = x_TD + y_THC.reshape(len(x_TD), -1) @ p["attn_output"].T
        n_TD = norm(x_TD, p["ffn_norm"])
        gate_TF, up_TF = n_TD @ p["ffn_gate"].T, n_TD @ p["ffn_up"].T
        x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ p["ffn_down"].T
    return norm(x_TD, w["output_norm"]) @ w.get("output", w["token_embd"]).T


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_llama_cpps_arithmetic(tmp_path, tied):
    tensors = random_tensors(tied)
    params, cfg = gguf_file.load(write(tmp_path / "model.gguf", tensors))
    assert (cfg.num_experts, cfg.intermediate_size, cfg.qk_norm) == (0, F, False)
    assert (cfg.rms_norm_eps, cfg.rope_theta, cfg.tie_embeddings) == (1e-5, 1e3, tied)
    tokens_BT = np.array([[3, 1, 4, 1, 5, 23]])
    found_BTV = decoder.forward(params, tokens_BT, cfg).logits
    np.testing.assert_allclose(found_BTV[0], logits(tensors, tokens_BT[0]), atol=2e-5, rtol=2e-5)


def test_quantized_tensors_are_read_exactly(tmp_path):
    """A block has 32 values of a row. Q4_1: d, m (f16), 16 bytes, w = d q + m; Q8_0: d, 32 int8."""
    rng = np.random.default_rng(1)
    half = lambda *shape: rng.normal(size=shape).astype(np.float16)
    as_bytes = lambda *parts: np.concatenate([p.view(np.uint8) for p in parts], axis=-1)
    d_F1, m_F1 = half(F, 1), half(F, 1)
    q_FN = rng.integers(0, 256, (F, 16), dtype=np.uint8)
    nibbles_FD = np.concatenate([q_FN % 16, q_FN // 16], axis=1)  # low ones first
    d_V1, q_VD = half(V, 1), rng.integers(-128, 128, (V, D), dtype=np.int8)

    tensors = random_tensors()
    tensors["blk.1.ffn_up.weight"] = as_bytes(d_F1, m_F1, q_FN)
    tensors["token_embd.weight"] = as_bytes(d_V1, q_VD)
    kinds = {
        "blk.1.ffn_up.weight": gguf.GGMLQuantizationType.Q4_1,
        "token_embd.weight": gguf.GGMLQuantizationType.Q8_0,
    }
    params, _ = gguf_file.load(write(tmp_path / "model.gguf", tensors, kinds=kinds))
    up_FD = np.asarray(params["layers_0"]["0"]["mlp"]["gate_up"])[1, F:]
    np.testing.assert_array_equal(up_FD, np.float32(d_F1) * nibbles_FD + np.float32(m_F1))
    np.testing.assert_array_equal(params["embed"], np.float32(d_V1) * q_VD)


def test_rows_of_partly_rotating_heads_come_back():
    w_FD = np.arange(2 * 6, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    found = gguf_file.half_split(w_FD, heads=2, rotary_dim=4)[:, 0]
    np.testing.assert_array_equal(found, [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11])


def test_parameters_come_in_the_dtype_asked_for(tmp_path):
    path = write(tmp_path / "model.gguf", random_tensors())
    params, _ = gguf_file.load(path, "bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}


def test_the_tokenizer_moves_into_files_of_its_own(tmp_path):
    path = write(tmp_path / "model.gguf", random_tensors())
    gguf_file.write_tokenizer(path, tmp_path)
    tokenizer = CheckpointTokenizer(tmp_path)
    ids = lambda *tokens: [TOKENS.index(token) for token in tokens]
    expected = ids("ab", "Ġab", "Ġ", "1", "2", "Ã", "©", "<think>")  # digits stand alone
    assert tokenizer.encode("ab ab 12é<think>") == expected
    assert gguf_file.tokenizer(path).encode("ab ab 12é<think>").ids == expected
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == [1, *ids("a"), 2]
    assert tokenizer.decode([1, *expected, 2]) == "ab ab 12é<think>"
    assert (tokenizer.stop_ids, tokenizer.pad_id) == ((2, 0), 2)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(FileNotFoundError):
        gguf_file.load(path)
    path.write_bytes(b"no GGUF" * 10)
    with pytest.raises(ValueError, match="no GGUF file"):
        gguf_file.load(path)
    path = write(tmp_path / "mamba.gguf", random_tensors(), architecture="mamba")
    with pytest.raises(ValueError, match=r"general.architecture='mamba'; only 'llama'"):
        gguf_file.load(path)
    path = write(
        tmp_path / "yarn.gguf", random_tensors(), strings={"llama.rope.scaling.type": "yarn"}
    )
    with pytest.raises(ValueError, match=r"llama.rope.scaling.type='yarn' is not supported"):
        gguf_file.load(path)
    path = write(tmp_path / "pre.gguf", random_tensors(), strings={"tokenizer.ggml.pre": "qwen2"})
    with pytest.raises(ValueError, match=r"pre='qwen2'; .* one of \['smollm'\]"):
        gguf_file.tokenizer(path)


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    tensors = random_tensors()
    del tensors["blk.1.attn_k.weight"]
    tensors["blk.0.attn_q.bias"] = np.ones(H * C, np.float32)
    tensors["blk.0.ffn_up.weight"] = np.ones((F, D + 1), np.float32)
    with pytest.raises(ValueError) as error:
        gguf_file.load(write(tmp_path / "model.gguf", tensors))
    assert str(error.value).endswith(
        "missing: ['blk.1.attn_k.weight']; unexpected: ['blk.0.attn_q.bias']; "
        "misshapen: ['blk.0.ffn_up.weight (64, 33), not (64, 32)']"
    )
