"""How many tiles one grid step of the kernels takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """Attributes:
    tiles: tiles a grid step; several at once keep the vector units busy while one tile's
      reductions are under way. A divisor of the number of tiles.
    """

    tiles: int

    def check(self, total: int) -> None:
        """Raises ValueError unless ``total`` tiles come out even."""
        if self.tiles < 1 or total % self.tiles:
            raise ValueError(
                f"blocks.tiles={self.tiles} must be a divisor of the number of tiles, {total}"
            )


def largest_divisor(total: int, most: int) -> int:
    """The largest divisor of ``total`` that is at most ``most``."""
    return next(n for n in range(min(total, most), 0, -1) if total % n == 0)
