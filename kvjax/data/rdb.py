"""Character vectors from an R lazy-load database (`Rdata.rdx` + `Rdata.rdb`).

R keeps package data as a gzip-compressed index of (offset, length) pairs and a file of
zlib-compressed chunks, both in R's XDR serialisation (R Internals, "Serialization Formats").
Only what a character vector and the index need is read; anything else is a `ValueError`.
"""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SYMBOL, _PAIRS, _CHARS, _BOOLS, _INTEGERS, _STRINGS, _LIST = 1, 2, 9, 10, 13, 16, 19
_NIL, _REFERENCE = 0xFE, 0xFF
_HAS_ATTRIBUTES = 0x200


class _Reader:
    """Reads one serialised R value; vectors become lists, pair lists dicts, NULL is None."""

    def __init__(self, data: bytes):
        self.data, self.at, self.symbols = data, 0, list[str]()

    def value(self) -> Any:
        self._header()
        return self._item()

    def _header(self) -> None:
        self._take(2)  # "X\n": big-endian
        version, _, _ = (self._int() for _ in range(3))
        if version == 3:
            self._take(self._int())  # the native encoding's name

    def _take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise ValueError(f"R data ends early: {count} bytes wanted at {self.at}")
        self.at += count
        return self.data[self.at - count : self.at]

    def _int(self) -> int:
        return struct.unpack(">i", self._take(4))[0]

    def _item(self) -> Any:
        flags = self._int()
        kind = flags & 0xFF
        readers: dict[int, Callable[[], Any]] = {
            _NIL: lambda: None,
            _CHARS: lambda: self._chars(),
            _SYMBOL: lambda: self._symbol(),
            _REFERENCE: lambda: self.symbols[(flags >> 8) - 1],
            _BOOLS: lambda: self._vector(self._int),
            _INTEGERS: lambda: self._vector(self._int),
            _STRINGS: lambda: self._vector(self._item),
            _LIST: lambda: self._vector(self._item),
            _PAIRS: lambda: self._pairs(flags),
        }
        if kind not in readers:
            raise ValueError(f"R data at byte {self.at}: type {kind} is not a character vector")
        value = readers[kind]()
        if flags & _HAS_ATTRIBUTES and kind in (_INTEGERS, _STRINGS, _LIST):
            attributes = self._item()
            if kind == _LIST and attributes and "names" in attributes:
                return dict(zip(attributes["names"], value, strict=True))
        return value

    def _chars(self) -> str:
        length = self._int()
        return "" if length == -1 else self._take(length).decode("utf-8")  # -1 is NA

    def _symbol(self) -> str:
        self.symbols.append(self._item())
        return self.symbols[-1]

    def _vector(self, element: Callable[[], Any]) -> list[Any]:
        return [element() for _ in range(self._int())]

    def _pairs(self, flags: int) -> dict[str, Any]:
        """A pair list: cells of (tag, value) until NULL."""
        pairs: dict[str, Any] = {}
        while flags & 0xFF == _PAIRS:
            tag = self._item()
            pairs[tag] = self._item()
            flags = self._int()
        return pairs


def _index(stem: Path) -> dict[str, list[int]]:
    packed = stem.with_suffix(".rdx").read_bytes()
    return _Reader(zlib.decompress(packed, wbits=47)).value()["variables"]  # 47: zlib or gzip


def names(stem: Path) -> list[str]:
    """Names of the values in `stem.rdx`, sorted."""
    return sorted(_index(stem))


def read_strings(stem: Path, name: str) -> list[str]:
    """The character vector `name`: `stem.rdx` says where in `stem.rdb` it is."""
    offset, length = _index(stem)[name]
    with stem.with_suffix(".rdb").open("rb") as file:
        file.seek(offset)
        chunk = file.read(length)
    # 4 bytes of uncompressed length, then a zlib stream
    return _Reader(zlib.decompress(chunk[4:])).value()
