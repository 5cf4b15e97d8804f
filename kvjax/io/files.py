"""What every reader here shares: one error class, checked JSON, folders that appear whole.

A file is a stranger's: nothing in it is believed, or allocated for, before it is checked against
the file's own size.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 512 << 20


class FileError(ValueError):
    """A file that cannot be used: one line that names the file and, if there is one, the tensor."""

    def __init__(self, file: str | os.PathLike[str], problem: str, tensor: str | None = None):
        part = "" if tensor is None else f"tensor {quote(tensor)}: "
        line = f"{os.fspath(file)}: {part}{problem}"
        super().__init__("".join(c if c.isprintable() else " " for c in line))


def quote(value: object, limit: int = 80) -> str:
    """A name or value out of a file, printable and short."""
    try:
        text = repr(value[: 2 * limit] if isinstance(value, str | list) else value)
    except RecursionError:  # how deep JSON and repr may nest differs from Python to Python
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def file_size(path: Path) -> int:
    """Bytes of a plain file; FileError where there is none."""
    try:
        if not path.is_file():
            raise FileError(path, "no such file")
        return path.stat().st_size
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise _as_file_error(path, error) from None


def _as_file_error(path: Path, error: Exception) -> FileError:
    return error if isinstance(error, FileError) else FileError(path, f"cannot be read: {error}")


def parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    """The object in `raw`. A key given twice is refused: readers differ on which one counts."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise FileError(path, f"{quote(twice)} is given twice")
        return data

    try:
        data = json.loads(raw.decode(), object_pairs_hook=unique)
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        raise FileError(path, f"is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(data, dict):
        raise FileError(path, "does not hold a JSON object")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; FileError where it is missing, damaged or no object."""
    size = file_size(path)
    if size > MAX_JSON_BYTES:
        raise FileError(path, f"{size} bytes of JSON, more than {MAX_JSON_BYTES}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _as_file_error(path, error) from None
    return parse_json(path, raw)


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a hidden sibling to write into; it takes the name `folder` only once complete.

    `folder` may exist if it is empty. FileError where it holds something.
    """
    refuse_occupied(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    try:
        yield partial
        try:
            os.replace(partial, folder)  # onto an empty folder too: that is what POSIX rename does
        except OSError:
            refuse_occupied(folder)
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_occupied(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileError(folder, "already exists and is not an empty folder; choose another")
