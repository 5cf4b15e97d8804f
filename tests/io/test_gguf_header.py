"""Lengths in a GGUF header are believed only as far as the file reaches."""

import struct
from pathlib import Path

import numpy as np
import pytest

from kvjax.io.files import FileError
from kvjax.io.gguf_header import read_header

BIG = 2**63


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(
    name: bytes = b"w", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0,
    dims: int | None = None,
) -> bytes:  # fmt: skip
    dims = len(shape) if dims is None else dims
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", dims, *shape, kind, offset)


def file(
    tensors: list[bytes], keys: list[bytes], data: int = 64, tensor_count: int | None = None,
    key_count: int | None = None, magic: bytes = b"GGUF", version: int = 3,
) -> bytes:  # fmt: skip
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def test_a_valid_header(tmp_path: Path) -> None:
    keys = [
        key(b"a", 4, struct.pack("<I", 7)), key(b"b", 8, text(b"hi")), key(b"c", 7, b"\1"),
        key(b"d", 9, struct.pack("<IQ2f", 6, 2, 1.5, 2.5)),
        key(b"e", 9, struct.pack("<IQ", 8, 2) + text(b"x") + text(b"yz")),
    ]  # fmt: skip
    raw = file([tensor(), tensor(b"v", (4, 2), 0, 32)], keys)
    (tmp_path / "m.gguf").write_bytes(raw)
    metadata, tensors = read_header(tmp_path / "m.gguf")
    assert (metadata["a"], metadata["b"], metadata["c"]) == (7, "hi", True)
    np.testing.assert_array_equal(metadata["d"], np.float32([1.5, 2.5]))
    assert metadata["e"] == ["x", "yz"]
    assert tensors["v"].shape == (2, 4) and len(raw) - tensors["v"].last == 0


BAD = {
    "no magic": (file([], [], magic=b"GGML"), "does not begin with GGUF"),
    "too short": (b"GG", "magic: 4 bytes wanted"),
    "empty": (b"", "magic"),
    "version 1": (file([], [], version=1), "version 1"),
    "big endian": (file([], [], version=3 << 24), "little endian"),
    "tensors": (file([], [], tensor_count=BIG), "number of tensors: 9223372036854775808 declared"),
    "keys": (file([], [], key_count=BIG), "number of metadata keys"),
    "key length": (file([], [text(b"a", BIG)]), "length of metadata key 0"),
    "key of 1 MB": (file([], [text(b"a" * 70000)]), "more than 65535"),
    "key twice": (file([], [key(b"a", 0, b"\0")] * 2), "'a' is given twice"),
    "text length": (file([], [key(b"a", 8, text(b"", BIG))]), "length of 'a'"),
    "no UTF-8": (file([], [key(b"a", 8, text(b"\xff"))]), "'a': is not UTF-8"),
    "value type": (file([], [key(b"a", 99, b"")]), "'a': unknown value type 99"),
    "item type": (file([], [key(b"a", 9, struct.pack("<IQ", 99, 1))]), "unknown value type 99"),
    "nested": (file([], [key(b"a", 9, struct.pack("<IQ", 9, 1))]), "unknown value type 9"),
    "array of numbers": (file([], [key(b"a", 9, struct.pack("<IQ", 12, 64))]), "'a': 512 bytes"),
    "array of texts": (file([], [key(b"a", 9, struct.pack("<IQ", 8, BIG))]), "length of 'a'"),
    "alignment": (
        file([], [key(b"general.alignment", 4, struct.pack("<I", 0))]), "general.alignment: 0"
    ),
    "dimensions": (file([tensor(dims=2**31)], []), "tensor 'w': 2147483648 dimensions"),
    "no dimension": (file([tensor(shape=())], []), "tensor 'w': 0 dimensions"),
    "shape": (file([tensor(shape=(BIG, BIG))], []), "tensor 'w': "),
    "empty shape": (file([tensor(shape=(0,))], []), "tensor 'w': shape (0,)"),
    "type": (file([tensor(kind=99)], []), "tensor 'w': unknown type 99"),
    "part of a block": (file([tensor(shape=(31,), kind=2)], []), "Q4_0 blocks of 32"),
    "offset": (file([tensor(offset=2**64 - 32)], []), "tensor 'w': 32 bytes at"),
    "cut off": (file([tensor()], [], data=31), "tensor 'w': 32 bytes at"),
    "name twice": (file([tensor(), tensor(offset=32)], []), "tensor 'w': is there twice"),
    "overlap": (file([tensor(), tensor(b"v", offset=16)], []), "tensor 'w': overlaps 'v'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_damaged_headers_are_named(case: str, tmp_path: Path) -> None:
    raw, message = BAD[case]
    (tmp_path / "bad.gguf").write_bytes(raw)
    with pytest.raises(FileError) as caught:
        read_header(tmp_path / "bad.gguf")
    assert "bad.gguf: " in str(caught.value) and message in str(caught.value)
    assert "\n" not in str(caught.value)
