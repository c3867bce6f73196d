"""Safetensors files: the package reads ours, we read the package's, and broken ones are named."""

import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.models.hugging_face.small_checkpoints import assert_same, write_file
from trace_jax.models.hugging_face import tensors as hf_tensors
from trace_jax.models.hugging_face.tensors import Spec, Writer

RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=(6, 5))
TENSORS = {
    "f32": VALUES.astype(np.float32),
    "scalar": np.array(2.5, np.float32),
    "bf16": VALUES.astype(ml_dtypes.bfloat16),
    "f16": VALUES.astype(np.float16),
    "i64": np.arange(7, dtype=np.int64) - 2**40,
    "u8": RNG.integers(0, 256, (3, 3, 3), dtype=np.uint8),
    "bool": VALUES > 0,
}
FLOAT8 = {
    "e4m3": RNG.integers(0, 256, (5, 3), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
    "e5m2": RNG.integers(0, 256, (5, 3), dtype=np.uint8).view(ml_dtypes.float8_e5m2),
}


def stored(path):
    return {name: hf_tensors.read(t) for name, t in hf_tensors.stored_tensors(path).items()}


def test_the_package_reads_what_we_write(tmp_path):
    write_file(tmp_path / "a", TENSORS)
    assert_same(safetensors.numpy.load_file(tmp_path / "a"), TENSORS)


def test_we_read_what_the_package_writes(tmp_path):
    safetensors.numpy.save_file(TENSORS | FLOAT8, tmp_path / "a", {"format": "pt"})
    assert_same(stored(tmp_path / "a"), TENSORS | FLOAT8)


def test_float8_comes_back_and_every_tensor_is_aligned(tmp_path):
    write_file(tmp_path / "a", FLOAT8 | TENSORS)
    assert_same(stored(tmp_path / "a"), FLOAT8 | TENSORS)
    for tensor in hf_tensors.stored_tensors(tmp_path / "a").values():
        assert tensor.offset % tensor.dtype.itemsize == 0


def test_parts_of_a_tensor(tmp_path, monkeypatch):
    write_file(tmp_path / "a", TENSORS)
    tensor = hf_tensors.stored_tensors(tmp_path / "a")["bf16"]
    assert np.array_equal(hf_tensors.read(tensor, 2, 3), TENSORS["bf16"][2:5])
    assert np.array_equal(hf_tensors.mapped(tensor)[4], TENSORS["bf16"][4])
    monkeypatch.setattr(hf_tensors, "CHUNK", 20)  # two rows of five BF16 values
    groups = list(hf_tensors.chunks(tensor))
    assert [len(rows) for rows in groups] == [2, 2, 2]
    assert np.array_equal(np.concatenate(groups), TENSORS["bf16"])


def test_a_file_appears_when_it_is_whole(tmp_path):
    path, specs = tmp_path / "a", {"x": Spec((2, 3), np.float32)}
    writer = Writer(path, specs)
    writer.write("x", np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match=r"not all was written of \['x'\]"):
        writer.__exit__(None)
    assert not path.exists()
    writer = Writer(path, specs)
    writer.write("x", np.zeros((2, 3), np.float32))
    writer.__exit__(KeyboardInterrupt)
    assert not path.exists()
    with Writer(path, specs) as w:
        for row in range(2):
            w.write("x", np.full((1, 3), row, np.float32))
    assert np.array_equal(stored(path)["x"][:, 0], [0, 1])


@pytest.mark.parametrize("rows", [np.zeros((3, 3), np.float32), np.zeros((2, 3), np.float64)])
def test_what_does_not_fit_is_not_written(tmp_path, rows):
    with (
        pytest.raises(ValueError, match=r"x: float.* does not fit"),
        Writer(tmp_path / "a", {"x": Spec((2, 3), np.float32)}) as writer,
    ):
        writer.write("x", rows)


def test_a_file_that_is_cut(tmp_path):
    path = tmp_path / "a"
    write_file(path, {"x": TENSORS["f32"]})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="x does not lie whole in the file: copy it again"):
        hf_tensors.stored_tensors(path)
    for torn in (whole[:20], whole[:5], b"version https://git-lfs.github.com/spec/v1"):
        path.write_bytes(torn)
        with pytest.raises(ValueError, match="is no safetensors file, or is cut short"):
            hf_tensors.stored_tensors(path)


def test_an_unknown_dtype(tmp_path):
    header = b'{"x":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(ValueError, match="x has dtype F4; known: "):
        hf_tensors.stored_tensors(tmp_path / "a")


def test_a_directory_without_its_shards(tmp_path):
    message = "neither model.safetensors nor model.safetensors.index.json in "
    with pytest.raises(FileNotFoundError, match=message):
        hf_tensors.directory_tensors(tmp_path)
    placed = {"x": "1.safetensors", "y": "2.safetensors"}
    (tmp_path / hf_tensors.INDEX).write_text(json.dumps({"weight_map": placed}))
    write_file(tmp_path / "1.safetensors", {"x": TENSORS["f32"]})
    message = re.escape("1 of 2 shards are missing: ['2.safetensors']")
    with pytest.raises(FileNotFoundError, match=message):
        hf_tensors.directory_tensors(tmp_path)
    write_file(tmp_path / "2.safetensors", {"z": TENSORS["f32"]})
    with pytest.raises(ValueError, match=r"places y in 2.safetensors, which lacks it"):
        hf_tensors.directory_tensors(tmp_path)
    write_file(tmp_path / "2.safetensors", {"y": TENSORS["u8"], "not placed": TENSORS["f32"]})
    assert set(hf_tensors.directory_tensors(tmp_path)) == {"x", "y"}
