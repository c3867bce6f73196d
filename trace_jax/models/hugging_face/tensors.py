"""Safetensors files, read and written a piece at a time: no file is ever in memory as a whole.

    8 bytes, the length of the header | header: JSON, name -> dtype, shape, data_offsets | data

The safetensors package reads no float8 through numpy and writes from memory only; the format is
short enough to be here, and the tests hold it against the package. Data is read rather than mapped:
mapped pages would count as memory of the process. Source: the format's own description; data.md 5.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import ml_dtypes
import numpy as np

DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
        "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16,
        "F32": np.float32, "F64": np.float64, "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CHUNK = 64 * 2**20  # bytes that pass through memory at once when rows are copied

Spec = jax.ShapeDtypeStruct


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    offset: int  # bytes from the start of the file
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the leading axis; of a scalar, its own."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def nbytes(spec: Spec | Stored) -> int:
    """Bytes of a tensor's values."""
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def total_bytes(specs: Mapping[str, Spec | Stored]) -> int:
    """Bytes of all these tensors."""
    return sum(map(nbytes, specs.values()))


def stored_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of one file, by name. Raises ValueError for a file that is cut or none."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > size - 8:
            raise ValueError(f"{path} is no safetensors file, or is cut short: copy it again")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}; known: {list(DTYPES)}")
        start, end = entry["data_offsets"]
        found[name] = Stored(path, 8 + length + start, DTYPES[entry["dtype"]], (*entry["shape"],))
        if nbytes(found[name]) != end - start or 8 + length + end > size:
            raise ValueError(f"{path}: {name} does not lie whole in the file: copy it again")
    return found


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises ValueError, naming it, where it is malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def directory_tensors(directory: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint, in one file or in shards under an index.

    Raises FileNotFoundError where neither is there or a shard is missing, ValueError where a shard
    lacks a tensor that the index places in it.
    """
    if (directory / INDEX).exists():
        placed = read_json(directory / INDEX).get("weight_map")
        if not placed:
            raise ValueError(f"{directory / INDEX} has no weight_map")
    elif (directory / SINGLE).exists():
        return stored_tensors(directory / SINGLE)
    else:
        raise FileNotFoundError(f"neither {SINGLE} nor {INDEX} in {directory}")
    files = {file: directory / file for file in sorted(set(placed.values()))}
    absent = [file for file, path in files.items() if not path.exists()]
    if absent:
        raise FileNotFoundError(
            f"{directory}: {len(absent)} of {len(files)} shards are missing: {absent[:10]}"
        )
    shards = {file: stored_tensors(path) for file, path in files.items()}
    for name, file in placed.items():
        if name not in shards[file]:
            raise ValueError(f"{directory}: {INDEX} places {name} in {file}, which lacks it")
    return {name: shards[file][name] for name, file in placed.items()}


def read(tensor: Stored, row: int = 0, rows: int | None = None) -> np.ndarray:
    """The tensor, or that many rows of it from `row` on."""
    shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
    out = np.empty(shape, tensor.dtype)
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset + row * tensor.row_bytes)
        if file.readinto(memoryview(out.reshape(-1).view(np.uint8))) != out.nbytes:
            raise ValueError(f"{tensor.path} ends within a tensor: copy it again")
    return out


def chunks(tensor: Stored) -> Iterator[np.ndarray]:
    """The tensor in groups of rows of at most CHUNK bytes (a row at least), in order."""
    if not tensor.shape:
        yield read(tensor)
        return
    step = max(1, CHUNK // max(1, tensor.row_bytes))
    for row in range(0, tensor.shape[0], step):
        yield read(tensor, row, min(step, tensor.shape[0] - row))


def mapped(tensor: Stored) -> np.ndarray:
    """The tensor as a read-only memory map: for what a few rows are taken of."""
    raw = np.memmap(tensor.path, np.uint8, "r", tensor.offset, (nbytes(tensor),))
    return raw.view(tensor.dtype).reshape(tensor.shape)


class Writer:
    """A file in the making: tensors in any order, each a group of rows at a time.

    In a with statement; the file takes its name when all is written, or never.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        """Writes the header."""
        self.path, self._partial = path, path.with_name(path.name + ".partial")
        # Wide dtypes first, so that every tensor is aligned: readers map the data.
        order = sorted(specs, key=lambda name: -np.dtype(specs[name].dtype).itemsize)
        header, self._left, position = {"__metadata__": {"format": "pt"}}, {}, 0
        for name in order:
            spec, start = specs[name], position
            position += nbytes(spec)
            header[name] = {
                "dtype": NAMES[np.dtype(spec.dtype)],
                "shape": list(spec.shape),
                "data_offsets": [start, position],
            }
            self._left[name] = (start, nbytes(spec))
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._specs, self._base = specs, 8 + len(text)
        self._file = open(self._partial, "wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, rows: np.ndarray) -> None:
        """Appends rows to a tensor. Raises ValueError for another dtype or too many rows."""
        start, left = self._left[name]
        if rows.dtype != self._specs[name].dtype or rows.nbytes > left:
            raise ValueError(f"{self.path}: {name}: {rows.dtype}{rows.shape} does not fit")
        self._file.seek(self._base + start)
        self._file.write(_bytes_of(rows))
        self._left[name] = (start + rows.nbytes, left - rows.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        unfinished = [name for name, (_, left) in self._left.items() if left]
        if kind is None and unfinished:
            raise ValueError(f"{self.path}: not all was written of {unfinished[:10]}")
        if kind is None:
            self._partial.replace(self.path)


def sample(path: Path, places: int = 16, size: int = 256) -> bytes:
    """A few bytes from all over a file, to tell it from others of the same shapes."""
    step = max(1, path.stat().st_size // places)
    with open(path, "rb") as file:
        found = []
        for place in range(places):
            file.seek(place * step + step // 2)
            found.append(file.read(size))
    return b"".join(found)


def write_raw(path: Path, chunks: Iterable[np.ndarray]) -> None:
    """Writes values one after the other, no header, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        for rows in chunks:
            file.write(_bytes_of(rows))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_text(path: Path, text: str) -> None:
    """Writes a small file, whole or not at all."""
    write_raw(path, [np.frombuffer(text.encode(), np.uint8)])


def _bytes_of(rows):
    return memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
