"""Eight-bit floats, one scale per token and head: what serving engines offer first.

A cast to float8 may turn what does not fit into NaN, so the scaled number is clipped before it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.per_token import PerToken

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@dataclass(frozen=True)
class Fp8(PerToken):
    """Holds ``codes`` float8 [..., C, D] and ``scale`` float32 [..., C]; see :func:`fp8`."""

    format: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r} is unknown: choose one of {sorted(FORMATS)}")

    def largest(self) -> float:
        return float(jnp.finfo(FORMATS[self.format]).max)

    def to_codes(self, x: jax.Array) -> jax.Array:
        return x.astype(FORMATS[self.format])


def fp8(tile: int = 128, format: str = "e4m3") -> Fp8:
    """Float8 per token and head: ``scale = max(absmax / largest, 1e-6)``, rounded to nearest even.

    Args:
      tile: tokens encoded together, even.
      format: "e4m3" (largest number 448, no infinities) or "e5m2" (57344).

    Raises:
      ValueError: for an odd tile or another format.
    """
    return Fp8(tile=tile, format=format)
