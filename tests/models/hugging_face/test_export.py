"""Hugging Face directories out of parameters: round trips, packing, declarations, kills."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.hugging_face import small_checkpoints
from tests.models.hugging_face.small_checkpoints import (
    BF16,
    CASES,
    DENSE,
    E4M3,
    FLAT,
    STYLES,
    Case,
    Killed,
    assert_same,
    assert_same_trees,
    config_json,
    export,
    imported,
    packed_mlp,
    read,
)
from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.guidance import policy
from trace_jax.models import architecture, checkpoint_hf, packing
from trace_jax.models.checkpoint_hf import Held

each_case = pytest.mark.parametrize("name", CASES)
both_styles = pytest.mark.parametrize("style", STYLES)


def json_of(directory, name="config"):
    """A JSON file of a directory, or None."""
    path = directory / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def leaves_of(directory):
    """The leaves of what a directory is loaded as, on the host."""
    return list(map(np.asarray, jax.tree.leaves(checkpoint_hf.load(directory)[0])))


# -- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@each_case
def test_import_and_export_give_back_every_bit(tmp_path, name, dtype):
    source = small_checkpoints.directory(tmp_path, name, dtype)
    workdir = imported(source, tmp_path / "work")
    params, cfg = checkpoint_hf.load(source)
    again, same_cfg = checkpoint_hf.load_imported(tmp_path / "work")
    assert same_cfg == cfg
    assert_same_trees(again, params)
    target = export(workdir, tmp_path / "out", shard_bytes=2e5)
    assert_same(read(target), read(source))
    assert json_of(target) == json_of(source)


@each_case
def test_parameters_in_memory_are_written_like_those_imported(tmp_path, name):
    source = small_checkpoints.directory(tmp_path, name, "float32")
    params, cfg = checkpoint_hf.load(source)
    like = imported(source, tmp_path / "work")
    assert_same(read(export(Held(params, cfg, like=like), tmp_path / "out")), read(source))
    checkpoint_hf.save(params, cfg, tmp_path / "saved")
    again, same_cfg = checkpoint_hf.load(tmp_path / "saved")
    assert same_cfg == cfg
    assert_same_trees(again, params)


@pytest.mark.parametrize(("name", "layout"), [("qwen3_5", "split"), ("qwen3_moe", "fused")])
def test_the_layout_of_experts_can_change(tmp_path, name, layout):
    source = small_checkpoints.directory(tmp_path, name)
    target = export(imported(source, tmp_path / "work"), tmp_path / "out", layout=layout)
    assert any("experts.gate_up_proj" in tensor for tensor in read(target)) == (layout == "fused")
    assert_same_trees(checkpoint_hf.load(target)[0], checkpoint_hf.load(source)[0])


@both_styles
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "qwen4_exp", "llama"])
def test_packed_checkpoints_round_trip_too(tmp_path, name, style):
    workdir = imported(small_checkpoints.directory(tmp_path, name), tmp_path / "work")
    options = dict(format="nvfp4", style=style, layout="split", shard_bytes=2e5)
    packed = export(workdir, tmp_path / "packed", **options)
    again = imported(packed, tmp_path / "again")
    target = export(again, tmp_path / "out")
    assert_same(read(target), read(packed))
    for file in ("config", "hf_quant_config"):
        assert json_of(target, file) == json_of(packed, file)
    assert (json_of(packed, "hf_quant_config") is None) == (style != "modelopt")
    stacked, _ = checkpoint_hf.load_imported(tmp_path / "again")
    assert_same_trees(stacked, checkpoint_hf.load(packed)[0])


@both_styles
def test_the_numbers_of_another_packer_come_back(tmp_path, style):
    draw, drawn = np.random.default_rng(0), {}
    outer = lambda module: drawn.setdefault(
        module.replace("gate", "up"), np.float32(draw.uniform(1e-4, 1))
    )
    made, config, files = packed_mlp(style, outer)
    source = small_checkpoints.write(tmp_path / "a", made, config, files)
    workdir = imported(source, tmp_path / "work")
    assert_same(read(export(workdir, tmp_path / "out")), made)
    (other,) = set(STYLES) - {style}
    crossed = export(workdir, tmp_path / "crossed", style=other)
    for mine, theirs in zip(leaves_of(crossed), leaves_of(source), strict=True):
        if mine.dtype == np.float32:  # outer scales: not every float32 is the reciprocal of one
            assert np.allclose(mine, theirs, rtol=2**-23, atol=0)
        else:
            assert mine.tobytes() == theirs.tobytes()
    activation = read(crossed)[f"model.layers.0.mlp.up_proj.{STYLES[other][-1]}"]
    assert activation == np.float32(1) / np.float32(0.37)


# -- what an export makes --------------------------------------------------------------------------


@both_styles
def test_an_export_holds_the_numbers_of_the_rollout(tmp_path, style):
    source = small_checkpoints.directory(tmp_path, "qwen3_5", "float32")
    params, cfg = checkpoint_hf.load(source)
    rules = (("experts/*", "nvfp4"), ("attention/out", "nvfp4"))
    options = dict(format="nvfp4", style=style, quantize=rules)
    found, _ = checkpoint_hf.load(export(Held(params, cfg), tmp_path / "out", **options))
    chosen = policy.resolve(rules, architecture.sites(cfg))
    wanted = packing.pack_jit(params, chosen, jnp.dtype("bfloat16"))
    leaves = lambda tree: jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, BlockScaled))
    pairs = zip(leaves(found), leaves(wanted), strict=True)
    packed = [(mine, ours) for mine, ours in pairs if isinstance(ours, BlockScaled)]
    assert len(packed) == 4 * 2 + 1
    for mine, ours in packed:
        assert_same_trees(mine, ours)
    assert found["embed"].dtype == BF16
    delta_net = found["layers_0"]["0"]["delta_net"]
    assert delta_net["A_log"].dtype == delta_net["norm"]["scale"].dtype == np.float32
    assert delta_net["dt_bias"].dtype == BF16


def test_a_modelopt_export(tmp_path):
    workdir = imported(small_checkpoints.directory(tmp_path, "qwen3_5_nested"), tmp_path / "work")
    target = export(workdir, tmp_path / "out", format="nvfp4", input_scale=0.5)
    tensors, expert = read(target), "model.language_model.layers.0.mlp.experts.1."
    for name, shape, dtype in (
        ("gate_proj.weight", (32, 32), np.uint8),
        ("gate_proj.weight_scale", (32, 4), E4M3),
        ("gate_proj.weight_scale_2", (), np.float32),
        ("gate_proj.input_scale", (), np.float32),
        ("down_proj.weight", (64, 16), np.uint8),
    ):
        assert (tensors[expert + name].shape, tensors[expert + name].dtype) == (shape, dtype)
    scales = [tensors[f"{expert}{half}_proj.weight_scale_2"] for half in ("gate", "up", "down")]
    assert scales[0] == scales[1] != scales[2]
    assert tensors[f"{expert}up_proj.input_scale"] == 0.5
    apart, config = json_of(target, "hf_quant_config"), json_of(target)
    assert apart["producer"]["name"] == "modelopt"
    assert apart["quantization"]["quant_algo"] == "NVFP4"
    assert apart["quantization"]["group_size"] == 16
    excluded, layer = apart["quantization"]["exclude_modules"], "model.language_model.layers."
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert config["quantization_config"]["ignore"] == excluded
    assert config["text_config"]["dtype"] == "bfloat16"
    assert {
        "lm_head", f"{layer}0.mlp.gate", f"{layer}0.mlp.shared_expert_gate",
        f"{layer}0.mlp.shared_expert.up_proj", f"{layer}0.linear_attn.in_proj_qkv",
        f"{layer}3.self_attn.q_proj",
    } <= set(excluded)  # fmt: skip
    assert not any(part in name for name in excluded for part in (".experts.", "norm", "emb"))


def test_a_compressed_tensors_export(tmp_path):
    workdir = imported(small_checkpoints.directory(tmp_path, "qwen3_moe"), tmp_path / "work")
    style = dict(format="nvfp4", style="compressed-tensors", input_scale=0.5)
    target = export(workdir, tmp_path / "out", **style)
    tensors, module = read(target), "model.layers.2.mlp.experts.0.down_proj."
    assert module + "weight" not in tensors
    assert tensors[module + "weight_packed"].shape == (64, 16)
    assert tensors[module + "weight_scale"].dtype == E4M3
    assert tensors[module + "weight_global_scale"].shape == (1,)
    assert tensors[module + "input_global_scale"] == [2]
    modelopt = read(export(workdir, tmp_path / "other", format="nvfp4"))
    outer = np.float32(1) / tensors[module + "weight_global_scale"]
    assert outer == modelopt[module + "weight_scale_2"]
    assert json_of(target, "hf_quant_config") is None
    declared = json_of(target)["quantization_config"]
    assert declared["format"] == "nvfp4-pack-quantized"
    weights = declared["config_groups"]["group_0"]["weights"]
    assert (weights["group_size"], weights["strategy"]) == (16, "tensor_group")
    assert "lm_head" in declared["ignore"]


def test_bfloat16_rounds_and_unpacks(tmp_path):
    source = small_checkpoints.directory(tmp_path, "qwen3_next", "float32")
    workdir, plain = imported(source, tmp_path / "work"), read(source)
    for name, values in read(export(workdir, tmp_path / "rounded", format="bf16")).items():
        kept = name.endswith(("A_log", "linear_attn.norm.weight"))
        wanted = plain[name] if kept else plain[name].astype(BF16)
        assert (values.dtype, values.tobytes()) == (wanted.dtype, wanted.tobytes()), name
    packed = export(workdir, tmp_path / "packed", format="nvfp4")
    unpacked = export(imported(packed, tmp_path / "again"), tmp_path / "unpacked", format="bf16")
    assert "quantization_config" not in json_of(unpacked)
    assert json_of(unpacked, "hf_quant_config") is None
    found, _ = checkpoint_hf.load(unpacked)
    exact, _ = checkpoint_hf.load(packed, dequantize=True)
    down = lambda params: np.asarray(params["layers_0"]["1"]["experts"]["down"])
    assert np.array_equal(down(found), down(exact).astype(BF16))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3_moe", dict(format="nvfp4", layout="fused"), "take layout 'split' for experts"),
        ("qwen3_next", dict(format="nvfp4", quantize=(("delta_net/in", "nvfp4"),)),
         r"in_proj_qkvz\.weight holds.*leave them out of quantize"),
        ("qwen3_moe", dict(format="nvfp4", quantize=(("experts/*", "mxfp4"),)),
         "experts/in is to be mxfp4"),
        ("qwen3_moe", dict(format="nvfp4", quantize=(("mlp/*", "nvfp4"),)), "matches nothing"),
        ("qwen3_moe", dict(format="fp4"), "format='fp4': choose one of"),
        ("qwen3_moe", dict(style="gguf"), "style='gguf': choose one of"),
        ("qwen3_moe", dict(shard_bytes=0), "shard_bytes=0: must be positive"),
    ],
)  # fmt: skip
def test_exports_that_are_refused(tmp_path, name, options, message):
    workdir = imported(small_checkpoints.directory(tmp_path, name), tmp_path / "work")
    with pytest.raises(ValueError, match=message):
        export(workdir, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_width_that_blocks_do_not_divide(tmp_path):
    odd = Case(dataclasses.replace(DENSE, intermediate_size=40), "qwen3", FLAT)
    source = small_checkpoints.write(
        tmp_path / "a", small_checkpoints.tensors(odd), config_json(odd)
    )
    with pytest.raises(ValueError, match=r"model\.intermediate_size=40 is no multiple of 16"):
        export(imported(source, tmp_path / "work"), tmp_path / "out", format="nvfp4")


def test_parameters_of_another_model(tmp_path):
    params, cfg = checkpoint_hf.load(small_checkpoints.directory(tmp_path, "qwen3"))
    other = dataclasses.replace(cfg, intermediate_size=32)
    with pytest.raises(ValueError, match=r"layer 0: the parameters do not fit .*mlp/down"):
        checkpoint_hf.save(params, other, tmp_path / "out")
    like = imported(small_checkpoints.directory(tmp_path, "llama"), tmp_path / "work")
    with pytest.raises(ValueError, match=r"the model in .*work cannot have qk_norm=True"):
        Held(params, cfg, like=like)


# -- beside the language model ---------------------------------------------------------------------

BESIDE = {
    "model.visual.blocks.0.attn.qkv.weight": np.ones((3, 2), BF16),
    "mtp.layers.0.mlp.experts.gate_up_proj": np.ones((2, 2, 2), BF16),
    "mtp.fc.weight": np.ones((2, 4), BF16),
}


def test_other_towers_are_left_out_or_kept(tmp_path, caplog):
    made, config = small_checkpoints.tensors(CASES["qwen3_moe"]), config_json(CASES["qwen3_moe"])
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    source = small_checkpoints.write(tmp_path / "a", made | BESIDE | rotary, config)
    with caplog.at_level("INFO", "trace_jax"):
        checkpoint_hf.load(source)
    assert "3 tensors are not modelled and left out: model.visual.*, mtp.*" in caplog.text
    workdir = imported(source, tmp_path / "work")
    assert_same(read(export(workdir, tmp_path / "out")), made | BESIDE)
    packed = export(workdir, tmp_path / "packed", format="nvfp4")
    assert BESIDE.keys() <= read(packed).keys()
    declared = json_of(packed, "hf_quant_config")["quantization"]
    assert {"model.visual*", "mtp*"} <= set(declared["exclude_modules"])


def test_what_would_no_longer_be_declared_is_left_out(tmp_path, caplog):
    made, config, files = packed_mlp("modelopt")
    source = small_checkpoints.write(tmp_path / "a", made | BESIDE, config, files)
    workdir = imported(source, tmp_path / "work")
    assert BESIDE.keys() <= read(export(workdir, tmp_path / "same")).keys()
    assert not caplog.text
    target = export(workdir, tmp_path / "out", format="bf16")
    assert "left out" in caplog.text
    assert not BESIDE.keys() & read(target).keys()


def test_the_head_of_tied_embeddings_is_a_copy(tmp_path):
    made = small_checkpoints.tensors(CASES["llama"])
    made["lm_head.weight"] = made["model.embed_tokens.weight"]
    source = small_checkpoints.write(tmp_path / "a", made, config_json(CASES["llama"]))
    workdir = imported(source, tmp_path / "work")
    assert_same(read(export(workdir, tmp_path / "out")), made)
    params, cfg = checkpoint_hf.load(source)
    assert "head" not in params
    held = read(export(Held(params, cfg, like=workdir), tmp_path / "held"))
    assert made.keys() - held.keys() == {"lm_head.weight"}  # it would be stale after an update


def test_an_import_as_arrays_is_no_longer_declared_packed(tmp_path):
    made, config, files = packed_mlp("modelopt")
    source = small_checkpoints.write(tmp_path / "a", made | BESIDE, config, files)
    checkpoint_hf.import_checkpoint(source, tmp_path / "work", dequantize=True, progress=False)
    target = export(checkpoint_hf.Imported(tmp_path / "work"), tmp_path / "out")
    for directory in (tmp_path / "work", target):
        assert "quantization_config" not in json_of(directory)
        assert json_of(directory, "hf_quant_config") is None
    assert not BESIDE.keys() & read(target).keys()
    assert_same_trees(checkpoint_hf.load(target)[0], checkpoint_hf.load(source, dequantize=True)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_config_names_the_dtype(tmp_path, dtype):
    source = small_checkpoints.directory(tmp_path, "qwen3", dtype)
    params, cfg = checkpoint_hf.load(source)
    checkpoint_hf.save(params, cfg, tmp_path / "out")
    assert json_of(tmp_path / "out")["dtype"] == dtype
    checkpoint_hf.save(params, cfg, tmp_path / "rounded", format="bf16")
    assert json_of(tmp_path / "rounded")["dtype"] == "bfloat16"


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 40, 150])
def test_a_killed_export_continues(tmp_path, monkeypatch, count):
    source, out = small_checkpoints.directory(tmp_path, "qwen3_5"), tmp_path / "out"
    workdir = imported(source, tmp_path / "work")
    options = dict(format="nvfp4", layout="split", shard_bytes=1e5)
    whole = export(workdir, tmp_path / "whole", **options)
    small_checkpoints.kill_after(count, monkeypatch)
    with pytest.raises(Killed):
        export(workdir, out, **options)
    assert not (out / "config.json").exists()
    monkeypatch.undo()
    before = small_checkpoints.stamps(out)
    assert bool(before) == (count > 10)
    with pytest.raises(ValueError, match="out holds another unfinished export"):
        export(workdir, out, format="bf16")
    export(workdir, out, **options)
    assert before.items() <= small_checkpoints.stamps(out).items()
    files = lambda folder: {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files(out) == files(whole)
    with pytest.raises(ValueError, match="out is not empty; name an empty directory"):
        export(workdir, out, **options)
