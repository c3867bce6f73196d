"""Tiny Hugging Face directories of every family, with random weights."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from trace_jax.models import architecture, checkpoint_hf, config
from trace_jax.models.checkpoint_hf import Imported, Options
from trace_jax.models.config import ModelConfig
from trace_jax.models.hugging_face import config as hf_config
from trace_jax.models.hugging_face import names as hf_names
from trace_jax.models.hugging_face import tensors as hf_tensors
from trace_jax.models.hugging_face.names import Layout

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
STYLES = {  # what a packed X.weight consists of: names after X
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": (
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale",
    ),
}  # fmt: skip
DENSE = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=48,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how its checkpoint is laid out."""

    cfg: ModelConfig
    family: str
    layout: Layout
    nested: str = ""  # model_type of a config.json with a text_config


def small(name: str) -> ModelConfig:
    """The tiny version of a model with four experts."""
    return dataclasses.replace(config.tiny(config.get(name)), num_experts=4)


FLAT = Layout()
NESTED = Layout(prefix="model.language_model.")
CASES = {
    "qwen3_moe": Case(small("qwen3_30b_a3b"), "qwen3_moe", FLAT),
    "qwen3_next": Case(small("qwen3_next_80b_a3b"), "qwen3_next", Layout(interleaved=True)),
    "qwen3_5": Case(small("qwen3_5_35b_a3b"), "qwen3_5_moe_text", Layout(fused_experts=True)),
    "qwen3_5_nested": Case(
        small("qwen3_5_35b_a3b"), "qwen3_5_moe_text", NESTED, nested="qwen3_5_moe"
    ),
    "qwen4_exp": Case(
        small("qwen3_8_flash_next"), "qwen4_exp_text",
        NESTED._replace(fused_experts=True, ngram_shards=13), nested="qwen4_exp",
    ),
    "qwen3": Case(DENSE, "qwen3", FLAT),
    "llama": Case(dataclasses.replace(DENSE, qk_norm=False, tie_embeddings=True), "llama", FLAT),
}  # fmt: skip


def tensors(case: Case, dtype: np.dtype = BF16, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a checkpoint; the decay of DeltaNet and its norm in float32."""
    rng, cfg, found = np.random.default_rng(seed), case.cfg, {}
    for layer in (None, *range(cfg.num_layers)):
        for leaf in hf_names.leaves(cfg, case.layout, layer):
            kept = leaf.name in ("delta_net/A_log", "delta_net/norm/scale")
            for piece in leaf.pieces:
                values = rng.normal(size=piece.shape).astype(np.float32)
                found[piece.tensor] = values if kept else values.astype(dtype)
    return found | hf_names.constants(cfg, case.layout)


def config_json(case: Case, **more) -> dict:
    """config.json of a case."""
    text = hf_config.write(case.cfg, case.family)
    if case.cfg.ngram:
        text["split_ngram_parts"] = case.layout.ngram_shards
    if not case.nested:
        return text | more
    tie = case.cfg.tie_embeddings
    return dict(model_type=case.nested, text_config=text, tie_word_embeddings=tie) | more


def packed_mlp(style: str, outer: Callable = lambda module: 0.25) -> tuple[dict, dict, dict]:
    """(tensors, config, other files) of a dense checkpoint whose MLPs are packed, every byte 0xA3.

    The block scales are 2, the first one 2^-9; outer(module) gives outer scales, "...up_proj.".
    """
    made = tensors(CASES["qwen3"])
    for name in [name for name in made if ".mlp." in name]:
        rows, width = made.pop(name).shape
        module = name.removesuffix("weight")
        codes, scales, second, activation = (module + end for end in STYLES[style])
        made[codes] = np.full((rows, width // 2), 0xA3, np.uint8)
        made[scales] = np.full((rows, width // 16), 2.0, E4M3)
        made[scales].view(np.uint8)[0, 0] = 0x01
        scale, shape = np.float32(outer(module)), ()
        if style == "compressed-tensors":
            scale, shape = 1 / scale, (1,)
        made[second] = np.full(shape, scale, np.float32)
        made[activation] = np.full(shape, 0.37, np.float32)
    if style == "modelopt":
        files = {"hf_quant_config": {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}}
        return made, config_json(CASES["qwen3"]), files
    declared = {"quant_method": style, "format": "nvfp4-pack-quantized"}
    return made, config_json(CASES["qwen3"], quantization_config=declared), {}


def write(
    directory: Path, made: dict, config: dict, files: dict | None = None, shards: int = 1
) -> Path:
    """A directory of tensors, in that many shards, with more JSON files by name."""
    directory.mkdir(parents=True)
    for name, value in {"config": config, **(files or {})}.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    names, placed = sorted(made), {}
    for shard in range(shards):
        mine = names[shard::shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else None
        placed |= dict.fromkeys(mine, file)
        write_file(directory / (file or hf_tensors.SINGLE), {name: made[name] for name in mine})
    if shards > 1:
        (directory / hf_tensors.INDEX).write_text(json.dumps({"weight_map": placed}))
    return directory


def write_file(path: Path, made: dict[str, np.ndarray]) -> None:
    """One file of tensors."""
    specs = {name: hf_tensors.Spec(a.shape, a.dtype) for name, a in made.items()}
    with hf_tensors.Writer(path, specs) as writer:
        for name, array in made.items():
            writer.write(name, array)


def read(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a directory."""
    return {n: hf_tensors.read(t) for n, t in hf_tensors.directory_tensors(directory).items()}


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    """The same tensors, bit for bit."""
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())[:10]
    for name, a in left.items():
        b = right[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), name


def directory(parent: Path, name: str, dtype: str = "bfloat16", shards: int = 2) -> Path:
    """The directory of a case, made below parent."""
    made = tensors(CASES[name], np.dtype(dtype))
    return write(parent / f"{name}_{dtype}", made, config_json(CASES[name]), shards=shards)


def imported(source: Path, workdir: Path) -> Imported:
    """An import, opened."""
    checkpoint_hf.import_checkpoint(source, workdir, progress=False)
    return Imported(workdir)


def export(source: checkpoint_hf.Parameters, target: Path, **options) -> Path:
    """The directory of an export."""
    checkpoint_hf.export(source, target, Options(**options), progress=False)
    return target


def layer_of(params: dict, cfg: ModelConfig, layer: int) -> dict:
    """The parameters of one layer, on the host."""
    place = architecture.places(cfg)[layer]
    one = lambda leaf: np.asarray(leaf[place.repeat])
    return jax.tree.map(one, params[place.segment][place.position])


def assert_same_trees(left: dict, right: dict) -> None:
    """The same leaves at the same places, bit for bit."""
    left, right = (jax.tree_util.tree_leaves_with_path(tree) for tree in (left, right))
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, a), (_, b) in zip(left, right, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


class Killed(BaseException):
    """Stands for a kill: nothing is cleaned up."""


def kill_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """Raises Killed when, from now on, another group of rows than the first `count` is written."""
    left, write = [count], hf_tensors.Writer.write

    def counted(self, name, rows):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        write(self, name, rows)

    patch.setattr(hf_tensors.Writer, "write", counted)


def stamps(folder: Path) -> dict[str, int]:
    """When each file of tensors was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
