"""Checkpoints with packed NVFP4 weights, in either style, and with FP8."""

import numpy as np
import pytest

from tests.models.hugging_face import small_checkpoints
from tests.models.hugging_face.small_checkpoints import (
    BF16,
    CASES,
    E4M3,
    STYLES,
    config_json,
    packed_mlp,
)
from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.models import checkpoint_hf
from trace_jax.models.hugging_face.quantized import reciprocal

both_styles = pytest.mark.parametrize("style", STYLES)


def mlp(params):
    """The MLPs of both layers."""
    return params["layers_0"]["0"]["mlp"]


@both_styles
def test_packed_weights_stay_packed(tmp_path, style):
    source = small_checkpoints.write(tmp_path / "a", *packed_mlp(style))
    params, _ = checkpoint_hf.load(source)
    gate_up = mlp(params)["gate_up"]
    assert isinstance(gate_up, BlockScaled)
    assert (gate_up.codes.shape, gate_up.scales.shape) == ((2, 96, 16), (2, 96, 2))
    assert np.all(np.asarray(gate_up.codes) == 0xA3)
    assert np.array_equal(gate_up.outer, np.full(2, 0.25, np.float32))


@both_styles
def test_packed_weights_become_arrays_where_asked_for(tmp_path, style):
    source = small_checkpoints.write(tmp_path / "a", *packed_mlp(style))
    params, _ = checkpoint_hf.load(source, dequantize=True)
    values = np.asarray(mlp(params)["gate_up"])
    assert (values.dtype, values.shape) == (np.float32, (2, 96, 32))
    # 0xA3: code 3 is 1.5, then code 10 is -1. The first block's scale is 2^-9, the others' is 2.
    assert np.array_equal(values[0, 0, :2], np.float32([1.5, -1]) * 2**-9 * 0.25)
    assert np.array_equal(values[0, 0, 16:18], [0.75, -0.5])
    assert np.array_equal(values[1, 50, :2], [0.75, -0.5])


@both_styles
def test_gate_and_up_share_their_outer_scale(tmp_path, style):
    halves = packed_mlp(style, lambda module: 0.5 if ".up_proj" in module else 0.25)
    source = small_checkpoints.write(tmp_path / "a", *halves)
    message = r"gate_proj\.weight.*0\.25.*up_proj\.weight.*0\.5.*must share one outer scale"
    with pytest.raises(ValueError, match=message):
        checkpoint_hf.load(source)
    values = np.asarray(mlp(checkpoint_hf.load(source, dequantize=True)[0])["gate_up"])
    assert np.array_equal(values[1, [1, 47, 49], 0], [0.75, 0.75, 1.5])


def test_four_bits_that_nothing_declares(tmp_path):
    made, config, _ = packed_mlp("modelopt")
    source = small_checkpoints.write(tmp_path / "a", made, config)
    with pytest.raises(ValueError, match=r"_proj\.weight is U8, but the checkpoint declares"):
        checkpoint_hf.load(source)


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    ],
)
def test_quantization_that_is_not_supported(tmp_path, declared):
    config = config_json(CASES["qwen3"], quantization_config=declared)
    source = small_checkpoints.write(
        tmp_path / "a", small_checkpoints.tensors(CASES["qwen3"]), config
    )
    with pytest.raises(ValueError, match=f"config: method '{declared['quant_method']}'"):
        checkpoint_hf.load(source)


def test_layers_that_are_stacked_are_stored_alike(tmp_path):
    made, config, files = packed_mlp("modelopt")
    made = {name: values for name, values in made.items() if "layers.1.mlp" not in name}
    plain = small_checkpoints.tensors(CASES["qwen3"])
    made |= {name: values for name, values in plain.items() if "layers.1.mlp" in name}
    source = small_checkpoints.write(tmp_path / "a", made, config, files)
    with pytest.raises(ValueError, match="layers 0 and 1 are stacked, but stored in different way"):
        checkpoint_hf.load(source)


def test_block_fp8_becomes_bfloat16(tmp_path):
    made, rng = small_checkpoints.tensors(CASES["qwen3"]), np.random.default_rng(1)
    block = (32, 24)  # of [32, 48] weights: one block of rows, two of columns; of [48, 32] both cut
    for name in [name for name in made if ".mlp." in name]:
        shape = made[name].shape
        made[name] = rng.normal(size=shape).astype(E4M3)
        blocks = tuple(-(-size // b) for size, b in zip(shape, block, strict=True))
        made[f"{name}_scale_inv"] = rng.uniform(0.5, 2, blocks).astype(np.float32)
    declared = {"quant_method": "fp8", "weight_block_size": block}
    config = config_json(CASES["qwen3"], quantization_config=declared)
    params, _ = checkpoint_hf.load(small_checkpoints.write(tmp_path / "a", made, config))
    for half, name in enumerate(("gate_proj", "up_proj")):
        ours = np.asarray(mlp(params)["gate_up"])[1, 48 * half : 48 * (half + 1)]
        assert ours.dtype == BF16
        values = made[f"model.layers.1.mlp.{name}.weight"]
        scales = made[f"model.layers.1.mlp.{name}.weight_scale_inv"]
        assert scales.shape == (2, 2)
        for row, column in ((0, 0), (31, 23), (32, 24), (47, 31)):
            value = np.float32(values[row, column]) * scales[row // 32, column // 24]
            assert ours[row, column] == value.astype(BF16)


@pytest.mark.parametrize("scale", [0.3, np.linspace(1, 2, 32)[:, None]], ids=["tensor", "row"])
def test_fp8_with_one_scale_or_one_a_row(tmp_path, scale):
    made, scale = small_checkpoints.tensors(CASES["qwen3"]), np.asarray(scale, np.float32)
    for name in [name for name in made if name.endswith("down_proj.weight")]:
        made[name] = made[name].astype(E4M3)
        made[f"{name}_scale"] = scale
    files = dict(hf_quant_config={"quantization": {"quant_algo": "FP8"}})
    source = small_checkpoints.write(tmp_path / "a", made, config_json(CASES["qwen3"]), files)
    params, _ = checkpoint_hf.load(source)
    values = made["model.layers.1.mlp.down_proj.weight"].astype(np.float32)
    assert np.array_equal(mlp(params)["down"][1], (values * scale).astype(BF16))


def test_fused_experts_in_fp8(tmp_path):
    made, rng = small_checkpoints.tensors(CASES["qwen3_5"]), np.random.default_rng(1)
    for name in [name for name in made if name.endswith("experts.down_proj")]:  # [4, 64, 32]
        made[name] = made[name].astype(E4M3)
        made[f"{name}_scale_inv"] = rng.uniform(0.5, 2, (4, 2, 2)).astype(np.float32)
    declared = {"quant_method": "fp8", "weight_block_size": [32, 16]}
    config = config_json(CASES["qwen3_5"], quantization_config=declared)
    params, _ = checkpoint_hf.load(small_checkpoints.write(tmp_path / "a", made, config))
    name = "model.layers.2.mlp.experts.down_proj"
    value = np.float32(made[name][3, 40, 10]) * made[f"{name}_scale_inv"][3, 1, 0]
    assert params["layers_0"]["2"]["experts"]["down"][0, 3, 40, 10] == value.astype(BF16)


def test_an_ngram_table_in_fp8_has_one_scale(tmp_path):
    made = small_checkpoints.tensors(CASES["qwen4_exp"])
    table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding."
    for name in [name for name in made if name.startswith(table)]:
        made[name] = made[name].astype(E4M3)
    made[f"{table}weight_scale"] = np.array([0.25], BF16)
    files = dict(hf_quant_config={"quantization": {"quant_algo": "MIXED_PRECISION"}})
    config = config_json(CASES["qwen4_exp"])
    params, _ = checkpoint_hf.load(small_checkpoints.write(tmp_path / "a", made, config, files))
    found = np.asarray(params["layers_0"]["1"]["ngram"]["table"])[0, 32:64]
    assert np.array_equal(
        found, (made[f"{table}shard_1.weight"].astype(np.float32) / 4).astype(BF16)
    )


def test_a_reciprocal_leads_back():
    exponents = np.random.default_rng(0).uniform(-60, 60, 2000)
    for encoding in np.exp2(exponents).astype(np.float32):
        outer = np.float32(1) / encoding
        assert np.float32(1) / reciprocal(outer) == outer
