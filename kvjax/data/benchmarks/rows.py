"""JSON lines, plain or gzipped, with an error that says where."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One JSON object and `where` it stands, "file:line"."""

    values: dict[str, Any]
    where: str

    def get(self, *names: str, kind: type | tuple[type, ...] = str) -> Any:
        """The value of the first of `names` that is there; it must be of `kind`."""
        name = next((name for name in names if name in self.values), None)
        if name is None:
            has = ", ".join(self.values) or "nothing"
            raise self.error(" or ".join(names), f"missing; the row has {has}")
        value = self.values[name]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # a bool is an int to Python, not to a benchmark
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(k.__name__ for k in kinds)
            found = type(value).__name__
            raise self.error(name, f"must be {wanted}, is {found}")
        return value

    def error(self, field: str, problem: str) -> ValueError:
        """A `ValueError` to raise about `field` of this row."""
        return ValueError(f"{self.where}: field {field}: {problem}")


def read_rows(path: Path) -> list[Row]:
    """The rows of a `.jsonl` or `.jsonl.gz` file, blank lines aside.

    `ValueError` names file and line where a line is no JSON object, and the file where it holds
    none, is no UTF-8 or a broken archive.
    """
    try:
        rows = list(_rows(path))
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read as JSON lines: {error}") from None
    if not rows:
        raise ValueError(f"{path}: holds no row")
    return rows


def _rows(path: Path) -> Iterator[Row]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Row(_object(line, f"{path}:{number}"), f"{path}:{number}")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: broken JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a JSON object, is {type(value).__name__}")
    return value
