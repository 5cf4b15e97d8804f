"""How the TPU kernel walks over exact entries."""

from __future__ import annotations

from dataclasses import dataclass

LANES = 128
STEP_BYTES = 4 * 2**20  # keys and values of one grid step, at most; two steps are in VMEM at a time


@dataclass(frozen=True)
class Tpu:
    """The walk of the TPU kernel: `entries` a grid step, of all KV heads of a row."""

    entries: int

    def check(self, size: int) -> None:
        """Raises ValueError unless `size` entries can be walked over so."""
        if not 1 <= self.entries <= size or (self.entries < size and self.entries % LANES):
            raise ValueError(
                f"entries={self.entries} must be all {size} entries, or fewer and a multiple of "
                f"{LANES}"
            )


def tpu_blocks(size: int, entry_bytes: int) -> Tpu:
    """The walk over `size` entries of `entry_bytes`, key and value of all KV heads together."""
    most = max(LANES, STEP_BYTES // entry_bytes // LANES * LANES)
    return Tpu(min(size, most))
