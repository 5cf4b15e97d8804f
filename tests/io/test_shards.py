"""Safetensors: what is written comes back, what is damaged is named."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvjax.io.files import FileError
from kvjax.io.shards import INDEX, SINGLE, read_file, read_folder, write_folder


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_round_trip_in_one_file_and_in_shards(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.normal(size=(4, 6)).astype(np.float16)[:, ::2],  # strided: must be copied
        "c": rng.normal(size=(7,)).astype(ml_dtypes.bfloat16),
    }
    for limit, files in ((1 << 30, 1), (70, 2), (1, 3)):
        folder = tmp_path / str(limit)
        folder.mkdir()
        write_folder(folder, tensors, limit)
        assert len(list(folder.glob("*.safetensors"))) == files
        assert (folder / INDEX).exists() == (files > 1)
        read = {name: tensor.read() for name, tensor in read_folder(folder).items()}
        assert read.keys() == tensors.keys()
        for name, value in tensors.items():
            assert read[name].dtype == value.dtype
            np.testing.assert_array_equal(read[name], value)


def test_data_at_an_odd_offset_comes_back_aligned(tmp_path: Path) -> None:
    values = np.arange(2, dtype=np.float32)
    raw = json.dumps({"w": entry()}).encode()
    path = write_raw(tmp_path / "x.safetensors", raw + b" " * (1 - len(raw) % 2), values.tobytes())
    read = read_file(path)["w"].read()
    assert read.flags.aligned
    np.testing.assert_array_equal(read, values)


BAD = {
    "header longer than the file": ({"w": entry()}, 10_000, "header of 10000 bytes"),
    "header of a huge length": ({"w": entry()}, 2**64 - 1, "header of 18446744073709551615"),
    "no JSON": (b"{", None, "not valid JSON"),
    "deeply nested": (b"[" * 100_000, None, "not valid JSON"),
    "no object": ([1], None, "JSON object"),
    "a name twice": (b'{"w": {}, "w": {}}', None, "'w' is given twice"),
    "no object as entry": ({"w": 3}, None, "'w': its header entry"),
    "unknown dtype": ({"w": entry(dtype="F12")}, None, "'w': unknown dtype 'F12'"),
    "dtype nested deeply": (
        b'{"w": {"dtype": ' + b"[" * 500 + b"]" * 500 + b"}}",
        None,
        "'w': unknown dtype [[",
    ),
    "dtype of another kind": ({"w": entry(dtype=["F32"])}, None, "'w': unknown dtype"),
    "negative shape": ({"w": entry(shape=[-2])}, None, "'w': bad shape"),
    "shape of texts": ({"w": entry(shape=["2"])}, None, "'w': bad shape"),
    "huge size": ({"w": entry(shape=[2**40, 2**40])}, None, "'w': F32"),
    "huge integer": ({"w": entry(shape=[10**300])}, None, "'w': bad shape"),
    "outside": ({"w": entry(shape=[4], offsets=[0, 16])}, None, "'w': data_offsets"),
    "far outside": ({"w": entry(offsets=[2**62, 2**62 + 8])}, None, "'w': data_offsets"),
    "backwards": ({"w": entry(offsets=[8, 0])}, None, "'w': data_offsets"),
    "size and shape differ": ({"w": entry(shape=[1])}, None, "'w': F32"),
    "overlap": ({"w": entry(), "v": entry(shape=[1], offsets=[4, 8])}, None, "overlaps"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_headers_are_named(case: str, tmp_path: Path) -> None:
    header, length, message = BAD[case]
    path = write_raw(tmp_path / "bad.safetensors", header, bytes(8), length)
    with pytest.raises(FileError, match="bad.safetensors") as caught:
        read_file(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_empty_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        read_file(tmp_path / "none.safetensors")
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(FileError, match="shorter than"):
        read_file(tmp_path / "empty.safetensors")
    with pytest.raises(FileError, match=f"neither {SINGLE} nor"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "..\\x.safetensors", "..",
     "C:x.safetensors", INDEX, "", 3, None, ["x.safetensors"], "x\0.safetensors"],
)  # fmt: skip
def test_a_shard_lies_beside_its_index(shard: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_raw(tmp_path / "x.safetensors", {"w": entry()}, bytes(8))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(FileError, match=r"tensor 'w': shard .* is no plain"):
        read_folder(folder)


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    for name in "ab":
        write_raw(tmp_path / f"{name}.safetensors", {"w": entry()}, bytes(8))

    def index(weight_map: Any) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    index({"w": "a.safetensors", "v": "b.safetensors"})
    with pytest.raises(FileError, match=r"b.safetensors: tensor 'w': also in a.safetensors"):
        read_folder(tmp_path)
    index({"w": "a.safetensors", "v": "a.safetensors"})
    with pytest.raises(FileError, match=r"tensor 'v': is not in 'a.safetensors'"):
        read_folder(tmp_path)
    index({"w": "c.safetensors"})
    with pytest.raises(FileError, match=r"c.safetensors: no such file"):
        read_folder(tmp_path)
    index([])
    with pytest.raises(FileError, match="weight_map"):
        read_folder(tmp_path)
