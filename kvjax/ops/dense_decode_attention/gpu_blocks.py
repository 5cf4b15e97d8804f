"""Block sizes of the GPU kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """How the GPU kernel walks over a cache.

    Attributes:
      splits: parts of the context that are read apart, and merged at the end.
      stages: tiles on their way from HBM, or being read, of one block of threads.
    """

    splits: int
    stages: int = 2

    def __post_init__(self) -> None:
        if self.splits < 1:
            raise ValueError(f"splits={self.splits} must be at least 1")
        if not 2 <= self.stages <= 3:
            raise ValueError(f"stages={self.stages} must be 2 or 3: shared memory holds no more")


def gpu_blocks(batch: int, kv_heads: int, size: int, cores: int) -> Gpu:
    """Enough parts for two blocks of threads a core, none under 512 entries.

    Args:
      batch, kv_heads, size: B, K, S.
      cores: streaming multiprocessors of the device.
    """
    wanted = -(-2 * cores // (batch * kv_heads))
    return Gpu(max(1, min(wanted, size // 512)))
