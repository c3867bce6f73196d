"""How published checkpoints store quantized tensors: NVFP4 in two styles, and FP8 (read only).

A tensor X.weight is, beside plain:

    NVFP4, ModelOpt             X.weight U8, X.weight_scale E4M3, X.weight_scale_2 = outer
    NVFP4, compressed-tensors   X.weight_packed, X.weight_scale, X.weight_global_scale = 1 / outer
    FP8                         X.weight E4M3 and X.weight_scale_inv, one a block of 128 x 128,
                                or X.weight_scale, one a tensor or a row

Codes and block scales are kept as they lie on disk. FP8 has no home here and becomes BF16.
Source: qwen.md section 4.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from trace_jax.formats import nvfp4
from trace_jax.formats.block_scaled import BlockScaled
from trace_jax.models.hugging_face.tensors import Spec, Stored, read_json

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
BLOCK = nvfp4.BLOCK
PARTS = ("codes", "scales", "outer")  # of a packed leaf, in the order of BlockScaled


class Style(NamedTuple):
    """Suffixes of the tensors of a packed weight X.weight, and what its outer scale is."""

    codes: str
    outer: str
    activation: str  # of X: the static outer scale of the input
    reciprocal: bool  # outer and activation scales are stored as 1 / scale
    scalar: tuple[int, ...]  # their shape


STYLES = {
    "modelopt": Style("", "_scale_2", "input_scale", False, ()),
    "compressed-tensors": Style("_packed", "_global_scale", "input_global_scale", True, (1,)),
}
SCALES = "_scale"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What a checkpoint says of itself."""

    method: str = ""  # "", a key of STYLES, or "fp8"
    block: tuple[int, int] = (128, 128)  # of fp8

    @property
    def style(self) -> Style:
        """The names of its packed weights; where it has none, a style all the same."""
        return STYLES.get(self.method, STYLES["modelopt"])


def quantization_of(config: Mapping[str, Any], directory: Path) -> Quantization:
    """From quantization_config of config.json, or from hf_quant_config.json beside it.

    Raises ValueError for a method, an algorithm or a block size that is not supported.
    """
    found = dict(config.get("quantization_config") or {})
    apart = directory / "hf_quant_config.json"
    if apart.exists():
        found = {"quant_method": "modelopt"} | read_json(apart)["quantization"] | found
    if not found:
        return Quantization()
    method, block = found.get("quant_method"), tuple(found.get("weight_block_size") or (128, 128))
    if method == "compressed-tensors":
        algorithm, known = found.get("format"), ("nvfp4-pack-quantized",)
    elif method == "modelopt":
        known = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PB_WO", "MIXED_PRECISION")
        algorithm = found.get("quant_algo")
    else:
        algorithm, known = method, ("fp8",)
    groups = (found.get("config_groups") or {}).values()
    sizes = {(group.get("weights") or {}).get("group_size") for group in groups if group}
    sizes |= {found.get("group_size")}
    if algorithm not in known or ("NVFP4" in algorithm.upper() and sizes - {16, None}):
        raise ValueError(
            f"quantization_config: method {method!r}, algorithm {algorithm!r}, group sizes "
            f"{sorted(map(str, sizes))}; supported: NVFP4 of modelopt and compressed-tensors in "
            "groups of 16, FP8 of modelopt, block fp8"
        )
    return Quantization(method, block)


def kind_of(name: str, tensors: Mapping[str, Stored], quantization: Quantization) -> str:
    """How a tensor is stored: "plain", "nvfp4" or "fp8"; "missing" where it is not there.

    Raises ValueError for 4-bit codes in a checkpoint that declares no such method.
    """
    codes = tensors.get(name + quantization.style.codes)
    if codes is not None and codes.dtype == np.uint8:
        if quantization.method not in STYLES:
            raise ValueError(
                f"{name} is U8, but the checkpoint declares method {quantization.method!r}: "
                f"hf_quant_config.json or quantization_config is missing; known: {list(STYLES)}"
            )
        return "nvfp4"
    if name not in tensors:
        return "missing"
    return "fp8" if tensors[name].dtype == E4M3 else "plain"


def stored_shapes(
    name: str, shape: tuple[int, ...], tensors: Mapping[str, Stored], quantization: Quantization
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The tensors that a weight consists of on disk, each with the shapes that it may have."""
    kind, style = kind_of(name, tensors, quantization), quantization.style
    if kind == "nvfp4":
        scalars = ((), (1,)) if len(shape) == 2 else ((), (1,), shape[:1])
        return {
            name + style.codes: ((*shape[:-1], shape[-1] // 2),),
            name + SCALES: ((*shape[:-1], shape[-1] // BLOCK),),
            name + style.outer: scalars,
        }
    if kind == "fp8":
        scales = ((), (1,), shape[:1], (*shape[:-1], 1), _blocks(shape, quantization.block))
        return {name: (shape,), fp8_scale(name, tensors): scales}
    return {name: (shape,)}


def fp8_scale(name: str, tensors: Mapping[str, Stored]) -> str:
    """The name of the scale of an FP8 tensor; shards of an n-gram table share one."""
    if name + "_scale_inv" in tensors:
        return name + "_scale_inv"
    return re.sub(r"shard_\d+\.weight$", "weight", name) + SCALES


def _blocks(shape, block):
    return (*shape[:-2], *(-(-size // b) for size, b in zip(shape[-2:], block, strict=False)))


def dequantize_fp8(values: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """BF16 of values E4M3 [..., rows, columns] times scales: one a block, a row or in all."""
    factor = scale.astype(np.float32)
    if factor.size == 1:
        factor = factor.reshape(())
    elif factor.shape == _blocks(values.shape, block):
        for axis, size in ((-2, block[0]), (-1, block[1])):
            factor = np.repeat(factor, size, axis)
        factor = factor[..., : values.shape[-2], : values.shape[-1]]
    else:
        factor = factor.reshape(*values.shape[:-1], 1)
    return (values.astype(np.float32) * factor).astype(BF16)


def dequantize(codes: np.ndarray, scales: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """Float32 values of a packed matrix."""
    return np.asarray(nvfp4.dequantize(BlockScaled(*map(jnp.asarray, (codes, scales, outer)))))


def reciprocal(scale: np.ndarray) -> np.ndarray:
    """A float32 whose own reciprocal is `scale`, where there is one; else what is nearest to it."""
    scale = np.float32(scale)
    nearest = np.float32(1) / scale
    for candidate in (nearest, np.nextafter(nearest, 0), np.nextafter(nearest, np.float32(np.inf))):
        if np.float32(1) / candidate == scale:
            return candidate
    return nearest


def packed_specs(name: str, shape: tuple[int, ...], style: Style) -> dict[str, Spec]:
    """The tensors of a packed weight that are to be written, without its activation scale."""
    return {
        name + style.codes: Spec((*shape[:-1], shape[-1] // 2), np.uint8),
        name + SCALES: Spec((*shape[:-1], shape[-1] // BLOCK), E4M3),
        name + style.outer: Spec(style.scalar, np.float32),
    }


def declarations(style: str, excluded: Iterable[str]) -> tuple[dict, dict | None]:
    """(quantization_config of config.json, hf_quant_config.json or None) of an NVFP4 checkpoint.

    W4A4: activations in 4 bits, blocks scaled on the fly under a static outer scale. `excluded`:
    the modules left as they are, by exact name.
    """
    excluded, group = sorted(excluded), {"num_bits": 4, "type": "float", "group_size": BLOCK}
    if style == "modelopt":
        producer = {"name": "modelopt", "version": "0.47.0"}
        sides = {"input_activations": {"dynamic": False, **group}}
        sides["weights"] = {"dynamic": False, **group}
        config = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {**sides, "targets": ["Linear"]}},
            "ignore": excluded,
            "producer": producer,
        }
        apart = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": excluded,
        }
        return config, {"producer": producer, "quantization": apart}
    group |= {"strategy": "tensor_group", "symmetric": True, "scale_dtype": "torch.float8_e4m3fn"}
    sides = {"input_activations": {"dynamic": "local", **group}}
    sides["weights"] = {"dynamic": False, **group}
    form = "nvfp4-pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**sides, "targets": ["Linear"], "format": form}},
        "ignore": excluded,
    }, None
