"""Reads the files of this folder and of `delta_rule`: see the README beside it."""

import functools
import json
import lzma
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent


@functools.cache
def arrays(name: str, folder: Path = FOLDER) -> dict[str, np.ndarray]:
    """A file's arrays by name.

    Layout, compressed with xz: a line of JSON, dtype -> name -> shape, then for each dtype the
    numbers of its arrays one after another, all their first bytes together, then all their second
    bytes and so on, which compresses better.
    """
    head, _, body = lzma.decompress((folder / f"{name}.xz").read_bytes()).partition(b"\n")
    found, at = {}, 0
    for dtype, shapes in json.loads(head).items():
        kind, sizes = np.dtype(dtype), [int(np.prod(shape)) for shape in shapes.values()]
        planes = np.frombuffer(body, np.uint8, sum(sizes) * kind.itemsize, at)
        at += planes.size
        numbers = planes.reshape(kind.itemsize, -1).T.copy().view(kind)[:, 0]
        parts = np.split(numbers, np.cumsum(sizes)[:-1])
        found |= {
            key: part.reshape(shape)
            for part, (key, shape) in zip(parts, shapes.items(), strict=True)
        }
    return found
