"""How the GPU kernels walk over a cache: validated, chosen by device and shape."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The walk of a GPU kernel.

    Attributes:
      splits: parts of the context that are read apart, and merged at the end.
      stages: tiles on their way from HBM, or being read, of one block of threads.
    """

    splits: int
    stages: int

    def __post_init__(self) -> None:
        if self.splits < 1:
            raise ValueError(f"splits={self.splits} must be at least 1")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages={self.stages} must be between 2 and 8")


def packed_blocks(batch: int, kv_heads: int, tiles: int, cores: int) -> Gpu:
    """For packed tiles: parts for three blocks of threads a core (as many as its registers hold),
    none under two tiles.

    Args:
      batch, kv_heads, tiles: B, K, N.
      cores: streaming multiprocessors of the device.
    """
    return Gpu(_splits(3 * cores, batch * kv_heads, tiles // 2), 3)


def dense_blocks(batch: int, kv_heads: int, size: int, cores: int) -> Gpu:
    """For exact entries: parts for three blocks of threads a core (as many as its shared memory
    holds), none under 256 entries.

    Args:
      batch, kv_heads, size: B, K, S.
      cores: streaming multiprocessors of the device.
    """
    return Gpu(_splits(3 * cores, batch * kv_heads, size // 256), 2)


def _splits(wanted: int, rows: int, most: int) -> int:
    return max(1, min(wanted // rows, most))
