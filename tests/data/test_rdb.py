"""R's format, from bytes written here by the book (R Internals, "Serialization Formats")."""

import gzip
import struct
import zlib

import pytest

from kvjax.data import rdb


def i32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}i", *values)


def chars(text: str) -> bytes:
    return i32(0x00040009, len(text.encode())) + text.encode()


def strings(*texts: str) -> bytes:
    return i32(0x10, len(texts)) + b"".join(map(chars, texts))


def names(*texts: str) -> bytes:
    return i32(0x402, 1) + chars("names") + strings(*texts) + i32(0xFE)


def names_again(*texts: str) -> bytes:
    return i32(0x402, 0x1FF) + strings(*texts) + i32(0xFE)  # the first symbol, by reference


HEADER = b"X\n" + i32(3, 0x40201, 0x30500, 5) + b"UTF-8"


@pytest.fixture
def stem(tmp_path):
    """An Rdata.rdx and .rdb with `one` = ("ä", NA) and `two` = ("b")."""
    na = i32(0x10, 2) + chars("ä") + i32(9, -1)
    chunks = [HEADER + na, HEADER + strings("b")]
    packed = [i32(len(chunk)) + zlib.compress(chunk) for chunk in chunks]
    (tmp_path / "Rdata.rdb").write_bytes(b"".join(packed))
    places = [i32(0xD, 2, 0, len(packed[0])), i32(0xD, 2, len(packed[0]), len(packed[1]))]
    variables = i32(0x213, 2) + places[0] + places[1] + names("one", "two")
    index = (
        HEADER + i32(0x213, 2) + variables + i32(0xA, 1, 1) + names_again("variables", "compressed")
    )
    (tmp_path / "Rdata.rdx").write_bytes(gzip.compress(index))
    return tmp_path / "Rdata"


def test_reads_names_and_strings(stem):
    assert rdb.names(stem) == ["one", "two"]
    assert rdb.read_strings(stem, "one") == ["ä", ""]
    assert rdb.read_strings(stem, "two") == ["b"]


def test_other_types_and_short_data_are_refused(tmp_path):
    stem = tmp_path / "Rdata"
    for value, message in ((i32(14, 1), "not a character vector"), (i32(0x10), "ends early")):
        stem.with_suffix(".rdx").write_bytes(gzip.compress(HEADER + value))
        with pytest.raises(ValueError, match=message):
            rdb.names(stem)
