"""Tensors out of a PyTorch file, and nothing else: no PyTorch, no unpickling.

A `.pt` file is a zip with a pickle and one record for each storage. The pickle is a program; this
runs only the few instructions that a dict of tensors needs, on a stack of its own, and refuses
every other instruction and every name but those below. It never imports or calls what a file names.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

MOST_BYTES = 1 << 30  # of a storage, and of the pickle
_STORAGES = {
    "torch FloatStorage": np.dtype(np.float32),
    "torch HalfStorage": np.dtype(np.float16),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}
_REBUILD, _ORDERED = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_PUSHED = ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1")  # their argument is the value
_CONSTANTS: dict[str, Any] = {"NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name(str):
    """A global that the file names, "module name"."""


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    size: int


_MARK = object()


def read_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """The dict of tensors in a file of `torch.save`: float32, float16 or bfloat16, by name.

    Raises:
      ValueError: naming the file, for anything that is not such a dict, whole and in bounds.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive)
    except (zipfile.BadZipFile, OSError, _Refused) as error:
        raise ValueError(f"{path}: {error}") from None


class _Refused(ValueError):
    """Why a file is not read."""


def _read(archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    programs = [n for n in archive.namelist() if n.endswith("/data.pkl") and n.count("/") == 1]
    if len(programs) != 1:
        raise _Refused("is no file of torch.save: it holds no single data.pkl")
    folder = programs[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in archive.namelist():
        if _record(archive, f"{folder}byteorder") != b"little":
            raise _Refused("its byte order is not little endian")
    return _Machine(archive, folder).run(_record(archive, programs[0]))


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    """A record, stored as it is; its checksum is verified."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise _Refused(f"record {name!r} is missing") from None
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > MOST_BYTES:
        raise _Refused(f"record {name!r} is compressed or larger than {MOST_BYTES} bytes")
    return archive.read(info)


class _Machine:
    """The stack, the memo, and what each permitted instruction does to them."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        self.archive, self.folder = archive, folder
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> dict[str, np.ndarray]:
        try:
            for opcode, argument, _ in pickletools.genops(program):
                if opcode.name == "STOP":
                    break
                self.one(opcode.name, argument)
            (found,) = self.stack
        except _Refused:
            raise
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise _Refused(f"its pickle is damaged: {str(error)[:100]}") from None
        if not isinstance(found, dict) or not all(
            type(k) is str and isinstance(v, np.ndarray) for k, v in found.items()
        ):
            raise _Refused("it holds something else than a dict of tensors")
        return found

    def one(self, name: str, argument: Any) -> None:
        push = self.stack.append
        if name in _PUSHED:
            push(argument)
        elif name in _CONSTANTS:
            push(_CONSTANTS[name])
        elif name == "MARK":
            push(_MARK)
        elif name == "EMPTY_DICT":
            push({})
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            push(self.memo[argument])
        elif name == "TUPLE":
            push(tuple(self.marked()))
        elif name in _SHORT_TUPLES:
            size = _SHORT_TUPLES[name]
            self.stack[-size:] = [tuple(self.stack[-size:])]
        elif name == "GLOBAL":
            push(self.name(argument))
        elif name == "BINPERSID":
            push(self.storage(self.stack.pop()))
        elif name == "REDUCE":
            arguments, function = self.stack.pop(), self.stack.pop()
            push(self.call(function, arguments))
        elif name in ("SETITEM", "SETITEMS"):
            self.set_items(self.marked() if name == "SETITEMS" else self.popped(2))
        elif name != "PROTO":
            raise _Refused(f"its pickle uses {name}, which a dict of tensors does not need")

    def marked(self) -> list[Any]:
        """What lies above the last mark."""
        at = max(i for i, value in enumerate(self.stack) if value is _MARK)
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def popped(self, count: int) -> list[Any]:
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise _Refused("its pickle sets items of something else than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if key in target:
                raise _Refused(f"tensor {key!r} is given twice")
            target[key] = value

    def name(self, argument: str) -> _Name:
        if argument not in (_REBUILD, _ORDERED, *_STORAGES):
            raise _Refused(f"its pickle names {argument[:80]!r}, no tensor of a known kind")
        return _Name(argument)

    def storage(self, described: Any) -> _Storage:
        kind, dtype, key, _, count = described
        if kind != "storage" or type(dtype) is not _Name or dtype not in _STORAGES:
            raise _Refused("its pickle refers to something else than a storage of floats")
        if type(key) is not str or not key.isdigit() or type(count) is not int or count < 0:
            raise _Refused("its pickle describes a storage badly")
        return _Storage(key, _STORAGES[dtype], count)

    def call(self, function: Any, arguments: Any) -> Any:
        if type(function) is _Name and function == _ORDERED and arguments == ():
            return {}
        if type(function) is not _Name or function != _REBUILD:
            raise _Refused("its pickle calls something else than the rebuilding of a tensor")
        storage, offset, shape, strides = arguments[:4]
        if type(storage) is not _Storage:
            raise _Refused("its pickle rebuilds a tensor from no storage")
        return self.tensor(storage, offset, shape, strides)

    def tensor(self, storage: _Storage, offset: Any, shape: Any, strides: Any) -> np.ndarray:
        numbers = [offset, *shape, *strides]
        if not all(type(n) is int and n >= 0 for n in numbers) or len(shape) != len(strides):
            raise _Refused("its pickle gives a tensor a bad shape")
        size = math.prod(shape)
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if size and last >= storage.size:
            raise _Refused("a tensor reaches beyond its storage")
        raw = _record(self.archive, f"{self.folder}data/{storage.key}")
        if len(raw) != storage.size * storage.dtype.itemsize:
            raise _Refused(f"storage {storage.key} holds {len(raw)} bytes, not {storage.size} "
                           f"numbers of {storage.dtype}")  # fmt: skip
        if size > storage.size:
            raise _Refused("a tensor repeats its storage")
        numbers_of = np.frombuffer(raw, storage.dtype)
        steps = [s * storage.dtype.itemsize for s in strides]
        view = np.lib.stride_tricks.as_strided(numbers_of[offset:], shape, steps)
        return np.ascontiguousarray(view).reshape(shape)
