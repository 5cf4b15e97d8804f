"""What one grid step of the TPU kernel takes."""

from __future__ import annotations

from dataclasses import dataclass

LANES = 128  # of a register
TOKENS = 64
MOST_LANES = 512  # four registers for each sublane group: enough to hide the latency of a step
VMEM = 8 << 20  # bytes, double buffers included: half of the smallest scoped limit


@dataclass(frozen=True)
class Blocks:
    """Attributes:
    lanes: rows of states that run side by side, a multiple of 128.
    tokens: tokens of a grid step; the state at its start is kept for the gradient.
    """

    lanes: int
    tokens: int = TOKENS

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.lanes % LANES:
            raise ValueError(f"blocks.lanes={self.lanes} is no multiple of {LANES}")
        if self.tokens < 8 or self.tokens % 8:
            raise ValueError(f"blocks.tokens={self.tokens} is no multiple of 8")


def blocks_for(rows: int, channels: int, tokens: int = TOKENS) -> Blocks:
    """As many lanes as are used and fit: three arrays of K numbers a lane and token, twice."""
    used = -(-rows // LANES) * LANES
    fit = VMEM // (2 * 4 * tokens * (3 * channels + 4)) // LANES * LANES
    return Blocks(max(LANES, min(used, MOST_LANES, fit)), tokens)
