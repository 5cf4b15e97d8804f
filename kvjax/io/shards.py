"""Safetensors files, one or many: the header is checked in full, then tensors are memory mapped.

Format: 8 bytes of header length (little endian), a JSON header, then the bytes of the tensors.
"""

import math
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from safetensors.numpy import save_file

from kvjax.io.files import FileError, file_size, parse_json, quote, read_json, write_json
from kvjax.io.tensors import DTYPES, StoredTensor

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
    "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, unread. FileError names what is wrong with the header."""
    size = file_size(path)
    try:
        with path.open("rb") as file:
            start, header = _header(path, size, file.read(8), file.read)
    except OSError as error:
        raise FileError(path, f"cannot be read: {error}") from None
    spans, tensors = [], {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, first, last = _entry(path, name, entry, size - start)
        spans.append((first, last, name))
        tensors[name] = _stored(path, dtype, shape, start + first, start + last)
    spans.sort()
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise FileError(path, f"overlaps {quote(other)}", tensor=name)
    return tensors


def _header(path: Path, size: int, prefix: bytes, read: Any) -> tuple[int, dict[str, Any]]:
    if len(prefix) < 8:
        raise FileError(path, "shorter than the 8 bytes that begin a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > size - 8:
        raise FileError(path, f"header of {length} bytes in a file of {size}")
    if length > MAX_HEADER_BYTES:
        raise FileError(path, f"header of {length} bytes, more than {MAX_HEADER_BYTES}")
    return 8 + length, parse_json(path, read(length))


def _entry(path: Path, name: str, entry: Any, size: int) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, first and last byte of one tensor, all of them possible within `size` bytes."""
    if not isinstance(entry, dict):
        raise FileError(path, "its header entry is no object", tensor=name)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise FileError(path, f"unknown dtype {quote(dtype)}", tensor=name)
    if not _whole_numbers(shape) or len(shape) > 8:
        raise FileError(path, f"bad shape {quote(shape)}", tensor=name)
    if not _whole_numbers(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise FileError(
            path, f"data_offsets {quote(offsets)} outside the {size} bytes of data", tensor=name
        )
    needed = math.prod(shape) * _ITEM_BYTES[dtype]
    if needed != offsets[1] - offsets[0]:
        raise FileError(
            path, f"{dtype} {quote(shape)} does not take {offsets[1] - offsets[0]} bytes",
            tensor=name,
        )  # fmt: skip
    return dtype, tuple(shape), offsets[0], offsets[1]


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _stored(path: Path, dtype: str, shape: tuple[int, ...], first: int, last: int) -> StoredTensor:
    def read() -> np.ndarray:
        if first == last:
            return np.zeros(shape, DTYPES[_FLOATS[dtype]])
        data = np.memmap(path, np.uint8, "r", first, (last - first,))
        values = np.asarray(data).view(DTYPES[_FLOATS[dtype]]).reshape(shape)
        return np.require(values, requirements="A")  # a header of odd length shifts the data

    return StoredTensor(path, shape, _FLOATS.get(dtype, dtype), read)


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder: all shards of its index, or its single file."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise FileError(folder, f"holds neither {SINGLE} nor {INDEX}")
        return read_file(folder / SINGLE)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(index, "weight_map is missing or empty")
    for name, shard in weight_map.items():
        _check_shard_name(index, name, shard)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in read_file(folder / shard).items():
            if name in tensors:
                raise FileError(tensor.file, f"also in {tensors[name].file.name}", tensor=name)
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise FileError(index, f"is not in {quote(shard)}", tensor=name)
    return tensors


def _check_shard_name(index: Path, name: str, shard: Any) -> None:
    """A shard lies beside its index: no folder, no `..`, no absolute path."""
    plain = isinstance(shard, str) and shard.endswith(".safetensors") and len(shard) <= 255
    if not plain or not shard.isprintable() or any(c in shard for c in "/\\:"):
        raise FileError(index, f"shard {quote(shard)} is no plain .safetensors name", tensor=name)


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray], max_shard_bytes: int) -> None:
    """Writes one file, or shards of at most `max_shard_bytes` (a larger tensor gets its own).

    Each tensor is read once, and at most one shard is held in memory.
    """
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    total = 0

    def write() -> None:
        save_file(pending, folder / f"{len(shards)}.partial", {"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name in tensors:
        # The package writes whatever lies behind the first pointer: strided arrays must be copied.
        value = np.asarray(tensors[name], order="C")
        if pending and sum(t.nbytes for t in pending.values()) + value.nbytes > max_shard_bytes:
            write()
        pending[name] = value
        total += value.nbytes
    write()
    _name_shards(folder, shards, total)


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (folder / "0.partial").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        shard = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{i}.partial").rename(folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
