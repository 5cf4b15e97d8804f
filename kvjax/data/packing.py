"""Documents with memory regions packed into rows of fixed length, resumable exactly.

    stream = grain.MapDataset.source(documents).seed(0).shuffle().repeat(None).random_map(make)
    batches = iter(Packed(stream.to_iter_dataset(grain.ReadOptions(num_threads=0)), config, shape))

Lengths are those after compression: a row holds `Shape.length` decoder positions. A document is
never cut and never shares attention with its neighbours (`Batch.segments`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from kvjax.soft import Batch, Row, Shape, SoftConfig, collate

# Draws a document; a `Row` of `lay_out` from a source element and NumPy's generator.
Make = Callable[[Any, np.random.Generator], Row]


def examples(source: Sequence[Any], make: Make, seed: int) -> grain.IterDataset:
    """Endless rows from a source: every element once an epoch, in an order of the epoch's own.

    The generator that `make` gets depends on the seed and on the row's number alone.

    Raises:
      ValueError: for an empty source.
    """
    if not len(source):
        raise ValueError("source is empty; give at least one document")
    drawn = grain.MapDataset.source(source).seed(seed).shuffle().repeat(None)
    # Laying out a row takes less than handing it from a thread; and nothing is in flight on resume.
    return drawn.random_map(make).to_iter_dataset(grain.ReadOptions(num_threads=0))


class Packed(grain.IterDataset):
    """Micro-batches of packed rows, stacked.

    Rows are filled first-fit. A document that fits nowhere waits, with up to `ahead` documents read
    at a time, and is the first of the next batch.

    Args:
      rows: documents, each a `Row`.
      config: the compressor's settings.
      shape: of a micro-batch.
      micro: how many are stacked along a leading axis (gradient accumulation).
      ahead: documents to choose from.
    """

    def __init__(
        self,
        rows: grain.IterDataset,
        config: SoftConfig,
        shape: Shape,
        micro: int = 1,
        ahead: int = 16,
    ) -> None:
        super().__init__(rows)
        if micro < 1 or ahead < 1:
            raise ValueError(f"micro is {micro}, ahead {ahead}; use 1 or more of each")
        self._settings = (config, shape, micro, ahead)

    def __iter__(self) -> PackedIterator:
        return PackedIterator(iter(self._parent), *self._settings)


class _Read(NamedTuple):
    """A document that was read, or None once it is in a batch, and the place to read it again."""

    before: dict[str, Any]
    row: Row | None


class PackedIterator(grain.DatasetIterator):
    """Iterates `Packed`. Its state is where the oldest waiting document is read, and which of those
    behind it are in batches already: as JSON, and no document in it."""

    def __init__(
        self, rows: grain.DatasetIterator, config: SoftConfig, shape: Shape, micro: int, ahead: int
    ) -> None:
        super().__init__(rows)
        self._config, self._shape, self._micro, self._ahead = config, shape, micro, ahead
        self._reads: list[_Read] = []

    def __next__(self) -> Batch:
        """A `Batch` whose leaves have a leading axis of micro-batches.

        Raises:
          ValueError: for a document larger than a row, or than all windows.
        """
        whole = [collate(self._fill(), self._config, self._shape) for _ in range(self._micro)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *whole)

    def get_state(self) -> dict[str, Any]:
        first = self._reads[0].before if self._reads else self._parent.get_state()
        return {"documents": first, "taken": [read.row is None for read in self._reads]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["documents"])
        self._reads = []
        for taken in state["taken"]:
            self._read()
            if taken:
                self._reads[-1] = self._reads[-1]._replace(row=None)

    def _fill(self) -> list[list[Row]]:
        packed: list[list[Row]] = [[] for _ in range(self._shape.rows)]
        left = np.full(self._shape.rows, self._shape.length)
        windows = self._shape.windows
        while (found := self._fitting(left, windows)) is not None:
            index, place = found
            row = self._reads[index].row
            assert row is not None
            packed[place].append(row)
            left[place] -= len(row.tokens)
            windows -= len(row.windows.length)
            self._take(index)
        return packed

    def _fitting(self, left: np.ndarray, windows: int) -> tuple[int, int] | None:
        """The first waiting document that fits, and the first row that it fits into."""
        while sum(read.row is not None for read in self._reads) < self._ahead:
            self._read()
        for index, (_, row) in enumerate(self._reads):
            if row is None or len(row.windows.length) > windows:
                continue
            if len(places := np.flatnonzero(left >= len(row.tokens))):
                return index, int(places[0])
        return None

    def _read(self) -> None:
        before = dict(self._parent.get_state())
        row = next(self._parent)
        needed, count = len(row.tokens), len(row.windows.length)
        if needed > self._shape.length or count > self._shape.windows:
            raise ValueError(
                f"a document takes {needed} positions and {count} windows; a row has "
                f"{self._shape.length} and a batch {self._shape.windows}: cut documents shorter, "
                "or give a larger shape"
            )
        self._reads.append(_Read(before, row))

    def _take(self, index: int) -> None:
        self._reads[index] = self._reads[index]._replace(row=None)
        while self._reads and self._reads[0].row is None:
            del self._reads[0]
