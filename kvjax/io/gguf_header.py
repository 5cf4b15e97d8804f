"""The header of a GGUF file, every length in it checked against what is left of the file.

The `gguf` package's own reader trusts counts and lengths; this one reads the same format (version
2 and 3, little endian) without allocating more than the file could fill, and tokens much faster.
"""

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvjax.io.files import FileError, file_size, quote

_SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
MAX_KEY = 65535  # the format's own limit


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies; `shape` outermost first, as NumPy has it (the file has it reversed)."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    first: int
    last: int


class _Cursor:
    """Reads forward through the file; every read is checked against its end."""

    def __init__(self, path: Path, size: int):
        self.path = path
        self.data = memoryview(np.memmap(path, np.uint8, "r")) if size else memoryview(b"")
        self.at = 0

    def take(self, count: int, what: str) -> memoryview:
        left = len(self.data) - self.at
        if count > left:
            raise FileError(self.path, f"{what}: {count} bytes wanted, {left} left in the file")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str, what: str) -> int:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))[0]

    def count(self, item_bytes: int, what: str) -> int:
        """A 64-bit count of items that take at least `item_bytes` each: it must fit the file."""
        count = self.number("Q", what)
        left = len(self.data) - self.at
        if count > left // item_bytes:
            raise FileError(self.path, f"{what}: {count} declared, {left} bytes left in the file")
        return count

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.count(1, f"length of {what}")
        if limit is not None and length > limit:
            raise FileError(self.path, f"length of {what}: {length}, more than {limit}")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError:
            raise FileError(self.path, f"{what}: is not UTF-8 text") from None


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata by key (text, numbers, lists of text, NumPy arrays) and the tensors by name."""
    cursor = _Cursor(path, file_size(path))
    if bytes(cursor.take(4, "magic")) != b"GGUF":
        raise FileError(path, "does not begin with GGUF")
    version = cursor.number("I", "version")
    if version not in (2, 3):
        raise FileError(path, f"GGUF version {version}; only 2 and 3, little endian, are read")
    tensor_count = cursor.count(24, "number of tensors")
    key_count = cursor.count(13, "number of metadata keys")
    metadata: dict[str, Any] = {}
    for i in range(key_count):
        key = cursor.text(f"metadata key {i}", MAX_KEY)
        if key in metadata:
            raise FileError(path, f"metadata key {quote(key)} is given twice")
        metadata[key] = _value(cursor, quote(key))
    return metadata, _tensors(cursor, metadata, tensor_count)


def _value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number("I", f"type of {key}")
    if kind == _STRING:
        return cursor.text(key)
    if kind != _ARRAY:
        return _scalars(cursor, kind, 1, key)[0].item()
    kind = cursor.number("I", f"item type of {key}")
    if kind == _STRING:
        return [cursor.text(key) for _ in range(cursor.count(8, f"length of {key}"))]
    return _scalars(cursor, kind, cursor.count(1, f"length of {key}"), key)


def _scalars(cursor: _Cursor, kind: int, count: int, key: str) -> np.ndarray:
    if kind not in _SCALARS:
        raise FileError(cursor.path, f"{key}: unknown value type {kind}")
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(cursor.take(count * dtype.itemsize, key), dtype)


def _tensors(cursor: _Cursor, metadata: dict[str, Any], count: int) -> dict[str, GgufTensor]:
    path = cursor.path
    declared = [_declared(cursor, i) for i in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment % 8:
        raise FileError(path, f"general.alignment: {quote(alignment)} is no multiple of 8")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, size, offset in declared:
        if name in tensors:
            raise FileError(path, "is there twice", tensor=name)
        first = start + offset
        if first + size > len(cursor.data):
            raise FileError(
                path, f"{size} bytes at {first} in a file of {len(cursor.data)}", tensor=name
            )
        tensors[name] = GgufTensor(name, kind, shape, first, first + size)
    for one, next_one in pairwise(sorted(tensors.values(), key=lambda t: t.first)):
        if next_one.first < one.last:
            raise FileError(path, f"overlaps {quote(next_one.name)}", tensor=one.name)
    return tensors


def _declared(
    cursor: _Cursor, i: int
) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int, int]:
    name = cursor.text(f"name of tensor {i}", MAX_KEY)
    dims = cursor.number("I", f"dimensions of {quote(name)}")
    if not 1 <= dims <= 4:
        raise FileError(cursor.path, f"{dims} dimensions, 1 to 4 are possible", tensor=name)
    shape = tuple(cursor.number("Q", f"shape of {quote(name)}") for _ in range(dims))[::-1]
    number = cursor.number("I", f"type of {quote(name)}")
    offset = cursor.number("Q", f"offset of {quote(name)}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise FileError(cursor.path, f"unknown type {number}", tensor=name) from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not all(shape) or shape[-1] % block:
        raise FileError(cursor.path, f"shape {shape} in {kind.name} blocks of {block}", tensor=name)
    return name, kind, shape, math.prod(shape) // block * block_bytes, offset
