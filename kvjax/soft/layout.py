"""Where soft tokens go: regions of any number among raw text, as arrays of fixed shape.

Made on the host in NumPy, by the data pipeline or before a prefill. A region becomes the decoder
tokens start, M × memory, end, at ordinary consecutive positions; its own tokens go to the encoder
in windows. A table says which soft token each memory position takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvjax.soft.config import SoftConfig

IGNORE = -100  # a label that does not count
PADDING = -1  # the segment of padding


class Text(NamedTuple):
    """Raw text: decoder ids, and whether they are trained on."""

    tokens: Sequence[int]
    trained: bool = True


class Region(NamedTuple):
    """Text to compress: encoder ids, and its ratio (None: the model's first)."""

    tokens: Sequence[int]
    ratio: int | None = None


class Windows(NamedTuple):
    """R windows for the encoder, all int32; a window of length 0 is filler.

    Attributes:
      tokens: [R,width] encoder ids, left-aligned: overlap, own tokens, overlap, appended ids.
      length: [R], how many of them are real.
      first: [R], where the own tokens begin.
      own: [R], how many own tokens there are.
      ratio: [R], N.
    """

    tokens: Any
    length: Any
    first: Any
    own: Any
    ratio: Any


class Row(NamedTuple):
    """One document, not yet padded.

    Attributes:
      tokens: [T] int32 decoder ids, markers included.
      labels: [T] int32, the ids again where they are trained on, −100 elsewhere.
      slot: [T] int32, at memory tokens window · M + slot with this row's windows counted from 0;
        −1 elsewhere.
      windows: its windows.
    """

    tokens: np.ndarray
    labels: np.ndarray
    slot: np.ndarray
    windows: Windows


class Batch(NamedTuple):
    """Packed rows of fixed shape, all int32.

    Attributes:
      tokens, labels, slot: [B,T] as in `Row`; windows counted over the whole batch.
      segments: [B,T], the document of each token within its row; −1 at padding.
      windows: R windows, filler at the end.
    """

    tokens: Any
    labels: Any
    slot: Any
    segments: Any
    windows: Windows


@dataclass(frozen=True)
class Shape:
    """The fixed size of a batch: B rows of T decoder positions, and R encoder windows."""

    rows: int
    length: int
    windows: int


def windows(tokens: Sequence[int], config: SoftConfig, ratio: int | None = None) -> Windows:
    """A region's tokens cut into windows; none for an empty region.

    Raises:
      ValueError: for a ratio that the config does not have.
    """
    ratio = config.checked_ratio(ratio)
    ids = np.asarray(tokens, np.int32).reshape(-1)
    starts = range(0, len(ids), config.window)
    found = empty_windows(len(starts), config, ratio)
    for i, start in enumerate(starts):
        end = min(start + config.window, len(ids))
        left = max(start - config.overlap, 0)
        right = end if config.causal else min(end + config.overlap, len(ids))
        seen = ids[left:right]
        if config.pooling == "eos":
            appended = np.full(config.count(end - start, ratio), config.eos_id, np.int32)
            seen = np.concatenate([seen, appended])
        found.tokens[i, : len(seen)] = seen
        found.length[i], found.first[i], found.own[i] = len(seen), start - left, end - start
    return found


def empty_windows(count: int, config: SoftConfig, ratio: int | None = None) -> Windows:
    """`count` windows of filler."""
    length, first, own = np.zeros((3, count), np.int32)
    ratios = np.full(count, config.checked_ratio(ratio), np.int32)
    return Windows(np.zeros((count, config.width), np.int32), length, first, own, ratios)


def join_windows(parts: Sequence[Windows], config: SoftConfig, count: int | None = None) -> Windows:
    """Windows one after another, filled up to `count`; ValueError where they are more."""
    total = sum(len(part.length) for part in parts)
    fill = 0 if count is None else count - total
    if fill < 0:
        raise ValueError(f"windows: {total} do not fit in {count}; give a larger Shape.windows")
    whole = [*parts, empty_windows(fill, config)]
    return Windows(*(np.concatenate(leaves) for leaves in zip(*whole, strict=True)))


def slots(tokens: int, config: SoftConfig, ratio: int | None = None) -> np.ndarray:
    """For a region of so many tokens, window · M + slot of each of its soft tokens, int32."""
    per_window = config.window // config.checked_ratio(ratio)
    index = np.arange(config.count(tokens, ratio), dtype=np.int32)
    return index // per_window * config.slots + index % per_window


def lay_out(parts: Sequence[Text | Region], config: SoftConfig) -> Row:
    """One document of text and regions in any order, as decoder tokens and encoder windows.

    Markers and memory tokens are never trained on.
    """
    tokens, labels, slot = [], [], []
    cut: list[Windows] = []
    for part in parts:
        if isinstance(part, Text):
            ids = np.asarray(part.tokens, np.int32).reshape(-1)
            label = ids if part.trained else np.full_like(ids, IGNORE)
            where = np.full_like(ids, -1)
        else:
            inner = slots(len(part.tokens), config, part.ratio)
            inner = inner + sum(len(w.length) for w in cut) * config.slots
            ids = np.full(len(inner) + 2, config.memory, np.int32)
            ids[0], ids[-1] = config.memory_start, config.memory_end
            label, where = np.full_like(ids, IGNORE), np.full_like(ids, -1)
            where[1:-1] = inner
            cut.append(windows(part.tokens, config, part.ratio))
        tokens.append(ids)
        labels.append(label)
        slot.append(where)
    if not tokens:
        raise ValueError("parts is empty; give at least one Text or Region")
    joined = [np.concatenate(x) for x in (tokens, labels, slot)]
    return Row(joined[0], joined[1], joined[2], join_windows(cut, config))


def collate(packed: Sequence[Sequence[Row]], config: SoftConfig, shape: Shape) -> Batch:
    """Documents packed into rows, padded on the right to a fixed shape.

    Args:
      packed: for each row of the batch, its documents in order; fewer rows leave padding.
      config: the compressor's settings.
      shape: the fixed size.

    Raises:
      ValueError: where documents or windows do not fit.
    """
    if len(packed) > shape.rows:
        raise ValueError(f"packed has {len(packed)} rows; the shape has {shape.rows}")
    size = (shape.rows, shape.length)
    tokens, labels, slot, segments = (
        np.full(size, filler, np.int32) for filler in (0, IGNORE, -1, PADDING)
    )
    cut: list[Windows] = []
    before = 0
    for b, documents in enumerate(packed):
        at = 0
        for number, row in enumerate(documents):
            end = at + len(row.tokens)
            if end > shape.length:
                raise ValueError(f"row {b} holds {end} tokens or more; it has {shape.length}")
            tokens[b, at:end], labels[b, at:end] = row.tokens, row.labels
            slot[b, at:end] = np.where(row.slot < 0, -1, row.slot + before * config.slots)
            segments[b, at:end] = number
            cut.append(row.windows)
            before, at = before + len(row.windows.length), end
    return Batch(tokens, labels, slot, segments, join_windows(cut, config, shape.windows))
