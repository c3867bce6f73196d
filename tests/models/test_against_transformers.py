"""The loader and the forward against transformers, on tiny checkpoints of every family.

The logits lie in tests/golden/hugging_face beside the script that made them; the weights are drawn
from their names. Directories are written as save_pretrained writes them, then read by our loader.
"""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.golden.hugging_face import weights
from trace_jax.guidance.policy import NOTHING
from trace_jax.models import cache, checkpoint_hf, decoder

GOLDEN = Path(__file__).parents[1] / "golden" / "hugging_face"
CASES = sorted(path.stem for path in GOLDEN.glob("*.json"))
DECODED = ["llama", "qwen3_moe_a", "qwen3_next_b", "qwen3_5_moe_flat_a", "qwen4_exp_flat_b"]
WITH_EXPERTS = [case for case in CASES if "llama" not in case and "dense" not in case]
TOLERANCE = 1e-4


@functools.cache
def golden(case):
    """(config, tensors, arrays) of a case."""
    described = json.loads((GOLDEN / f"{case}.json").read_text())
    return described["config"], weights.tensors(described), np.load(GOLDEN / f"{case}.npz")


@functools.cache
def loaded(case):
    """What the loader makes of a case's directory as transformers saves it: (params, cfg)."""
    config, tensors, _ = golden(case)
    with tempfile.TemporaryDirectory() as directory:
        return load(Path(directory), config, tensors)


def load(directory, config, tensors, shards=1):
    """(params on the host, cfg) of a checkpoint written for the occasion."""
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save(tensors, directory / "model.safetensors")
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            mine = sorted(tensors)[shard::shards]
            weight_map |= dict.fromkeys(mine, file)
            save({name: tensors[name] for name in mine}, directory / file)
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    params, cfg = checkpoint_hf.load(directory)
    return jax.device_get(params), cfg


def save(tensors, path):
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})


@functools.partial(jax.jit, static_argnames="cfg")
def logits(params, tokens_BT, cfg):
    return decoder.forward(params, tokens_BT, cfg).logits


@functools.partial(jax.jit, static_argnames="cfg")
def one_token(params, token_B, position, memory, cfg):
    positions_B1 = jnp.full((len(token_B), 1), position)
    out = decoder.forward(params, token_B[:, None], cfg, positions_BT=positions_B1, cache=memory)
    return out.logits[:, -1], out.cache


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_directory_as_transformers_saves_it(case):
    params, cfg = loaded(case)
    arrays = golden(case)[2]
    ours = logits(params, arrays["tokens_BT"], cfg)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, arrays["logits_BTV"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", DECODED)
def test_decode_gives_the_logits_and_the_greedy_tokens_of_transformers(case):
    params, cfg = loaded(case)
    arrays = golden(case)[2]
    tokens_BT, new_BN = arrays["tokens_BT"], arrays["new_tokens_BN"]
    batch, length = tokens_BT.shape
    memory = cache.empty(cfg, NOTHING, batch, length + new_BN.shape[1], jnp.float32)
    found, following = [], []
    for position in range(length + new_BN.shape[1] - 1):
        token_B = tokens_BT[:, position] if position < length else following[-1]
        logits_BV, memory = one_token(params, token_B, position, memory, cfg)
        found.append(logits_BV)
        if position >= length - 1:
            following.append(jnp.argmax(logits_BV, -1).astype(tokens_BT.dtype))
    np.testing.assert_array_equal(np.stack(following, 1), new_BN)
    # The last of the prompt's logits choose the first new token: both files hold them.
    expected = np.concatenate([arrays["logits_BTV"], arrays["new_logits_BNV"][:, 1:]], axis=1)
    np.testing.assert_allclose(np.stack(found, 1), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", WITH_EXPERTS)
def test_fused_experts_and_shards_load_the_same(case, tmp_path):
    config, tensors, _ = golden(case)
    same(load(tmp_path, config, weights.fused(tensors), shards=2), loaded(case))


@pytest.mark.parametrize("case", ["qwen3_moe_b", "qwen4_exp_flat_b"])
def test_bfloat16_files_hold_the_same_values(case, tmp_path):
    config, tensors, _ = golden(case)
    narrow = {
        name: value.astype(ml_dtypes.bfloat16) if value.dtype == np.float32 else value
        for name, value in tensors.items()
    }
    same(load(tmp_path, config | {"dtype": "bfloat16"}, narrow), loaded(case))


def same(found, expected):
    """The same configuration and, whatever their dtype, the same values."""
    assert found[1] == expected[1]
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), found[0])
    jax.tree.map(np.testing.assert_array_equal, wide, expected[0])


HEADS = 4  # of the attention in qwen3_5_moe_flat_a


def changed(params, change):
    """The parameters with change(path, leaf) in place of each leaf; path such as 'a/b/c'."""
    named = lambda path, leaf: change("/".join(str(part.key) for part in path), leaf)
    return jax.tree_util.tree_map_with_path(named, params)


def plain_norms(path, leaf):
    """What 1 + scale takes for scale, everywhere that 1 + scale is meant."""
    return leaf - 1 if path.endswith("scale") and "delta_net" not in path else leaf


def swapped_halves(path, leaf):
    return np.roll(leaf, leaf.shape[-2] // 2, axis=-2) if path.endswith("experts/gate_up") else leaf


def queries_then_gates(path, leaf):
    """The rows as if all queries came first, then all gates."""
    if not path.endswith("attention/q"):
        return leaf
    layers, _, width = leaf.shape
    return leaf.reshape(layers, 2, HEADS, -1, width).swapaxes(1, 2).reshape(leaf.shape)


@pytest.mark.parametrize("mistake", [plain_norms, swapped_halves, queries_then_gates])
def test_the_golden_logits_tell_a_mistake(mistake):
    params, cfg = loaded("qwen3_5_moe_flat_a")
    arrays = golden("qwen3_5_moe_flat_a")[2]
    wrong = logits(changed(params, mistake), arrays["tokens_BT"], cfg)
    assert np.abs(wrong - arrays["logits_BTV"]).max() > 1000 * TOLERANCE


def without_selection(cfg):
    return dataclasses.replace(cfg, indexer=dataclasses.replace(cfg.indexer, budget=64))


def without_ends(cfg):
    """N-grams reach across what the checkpoint calls an end of sequence."""
    return dataclasses.replace(cfg, ngram=dataclasses.replace(cfg.ngram, eos_id=cfg.vocab_size))


@pytest.mark.parametrize("mistake", [without_selection, without_ends])
def test_the_golden_logits_of_flash_next_tell_a_mistake(mistake):
    params, cfg = loaded("qwen4_exp_flat_a")
    arrays = golden("qwen4_exp_flat_a")[2]
    wrong = logits(params, arrays["tokens_BT"], mistake(cfg))
    assert np.abs(wrong - arrays["logits_BTV"]).max() > 100 * TOLERANCE
