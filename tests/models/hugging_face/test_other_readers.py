"""Packed exports, read by the packages that others read them with. Optional: needs torch.

pip install torch compressed-tensors nvidia-modelopt
python -m pytest tests/models/hugging_face/test_other_readers.py
"""

import functools

import numpy as np
import pytest

from tests.models.hugging_face import small_checkpoints
from trace_jax.models import checkpoint_hf
from trace_jax.models.hugging_face.plan import Options

torch = pytest.importorskip("torch", reason="pip install torch")
from safetensors.torch import load_file  # noqa: E402  (needs torch)

PROJECTIONS = ("gate_proj", "up_proj")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Directory of a tiny Qwen3.5 checkpoint packed in a style, and our values of its experts."""
    made = tmp_path_factory.mktemp("packed")
    source = small_checkpoints.directory(made, "qwen3_5")

    @functools.cache
    def export(style):
        directory = made / style
        work = made / f"{style}_work"
        checkpoint_hf.import_checkpoint(source, work, progress=False)
        options = Options(format="nvfp4", style=style, layout="split")
        checkpoint_hf.export(checkpoint_hf.Imported(work), directory, options, progress=False)
        params, _ = checkpoint_hf.load(directory, dequantize=True)
        return directory, np.asarray(params["layers_0"]["0"]["experts"]["gate_up"])[0]

    return export


def tensors_of(directory, module):
    """Tensors of one module of an export, by the last part of their names."""
    stored = load_file(directory / "model.safetensors")
    names = [name for name in stored if f".{module}." in f".{name}"]
    return {name.rpartition(".")[2]: stored[name] for name in names}


def assert_read_alike(exported, style, read, **tolerance):
    """Gate and up of the first and the last expert, as `read` makes them of their tensors."""
    directory, ours = exported(style)
    for expert in (0, len(ours) - 1):
        modules = [f"layers.0.mlp.experts.{expert}.{projection}" for projection in PROJECTIONS]
        theirs = np.concatenate([read(tensors_of(directory, module)) for module in modules])
        np.testing.assert_allclose(theirs, ours[expert], **tolerance)


def test_compressed_tensors_unpacks_our_codes_and_scales(exported):
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")

    def read(t):
        out, half = t["weight_packed"].shape
        codes = helpers.unpack_fp4_from_uint8(t["weight_packed"], out, 2 * half).float()
        factor = t["weight_scale"].float() / t["weight_global_scale"]
        return (codes.reshape(out, -1, 16) * factor[..., None]).reshape(out, -1).numpy()

    # They divide by the reciprocal where we multiply: one rounding apart.
    assert_read_alike(exported, "compressed-tensors", read, rtol=2e-7)


def test_modelopt_dequantizes_to_our_values(exported):
    nvfp4 = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")

    def read(t):
        shape = torch.Size((t["weight"].shape[0], 2 * t["weight"].shape[1]))
        packed = nvfp4.NVFP4QTensor(shape, torch.float32, t["weight"])
        return packed.dequantize(
            dtype=torch.float32, scale=t["weight_scale"],
            double_scale=t["weight_scale_2"], block_sizes={-1: 16},
        ).numpy()  # fmt: skip

    assert_read_alike(exported, "modelopt", read, rtol=0, atol=0)


def test_their_packer_takes_our_codes_from_our_scales(exported):
    """But for the sign of zero, which we drop, and values on a tie: they divide where we multiply
    by the reciprocal (Transformer Engine's order, method.md 3.2), and 5 of 16,384 fall otherwise.
    """
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    directory, _ = exported("compressed-tensors")
    case = small_checkpoints.CASES["qwen3_5"]
    plain, _ = checkpoint_hf.load(
        small_checkpoints.directory(directory.parent / "plain", "qwen3_5")
    )
    gate_up = np.asarray(plain["layers_0"]["0"]["experts"]["gate_up"][0], np.float32)
    width, differ = case.cfg.moe_intermediate_size, []
    for expert in range(case.cfg.num_experts):
        for first, projection in enumerate(PROJECTIONS):
            t = tensors_of(directory, f"layers.0.mlp.experts.{expert}.{projection}")
            rows = torch.from_numpy(gate_up[expert, first * width : (first + 1) * width].copy())
            theirs = helpers.quantize_and_pack_fp4(
                rows, t["weight_scale"].float(), global_scale=t["weight_global_scale"],
                group_size=16,
            )  # fmt: skip
            nibbles = np.stack([theirs.numpy() & 15, theirs.numpy() >> 4])
            ours = np.stack([t["weight_packed"].numpy() & 15, t["weight_packed"].numpy() >> 4])
            apart = np.abs(np.where(nibbles == 8, 0, nibbles).astype(int) - ours)
            assert np.all(apart <= 1)
            differ.append(np.mean(apart))
    assert np.mean(differ) < 1e-3
