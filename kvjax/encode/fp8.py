"""Eight-bit floats, one scale per token and head: what serving engines offer first.

A cast to float8 may turn what does not fit into NaN, so the scaled number is clipped before it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.base import Encoder, Tile, check_role
from kvjax.ops.rounding import divide

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@dataclass(frozen=True)
class Fp8(Encoder):
    """Holds ``codes`` float8 [..., C, D] and ``scale`` float32 [..., C]; see :func:`fp8`."""

    format: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r} is unknown: choose one of {sorted(FORMATS)}")

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        x, dtype = x.astype(jnp.float32), FORMATS[self.format]
        largest = float(jnp.finfo(dtype).max)
        # The floor keeps the scale of a zero token positive; its codes are 0 all the same.
        scale = jnp.maximum(divide(jnp.abs(x).max(axis=-1), jnp.float32(largest)), 1e-6)
        codes = jnp.clip(x * (1 / scale[..., None]), -largest, largest)
        return {"codes": codes.astype(dtype), "scale": scale}

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """``codes`` float8 [..., C, D], ``scale`` float32 [..., C]: what is stored."""
        check_role(role)
        return tile

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        check_role(role)
        return tile["codes"].astype(jnp.float32) * tile["scale"][..., None]

    def tile_bytes(self, role: str, dim: int) -> int:
        check_role(role)
        return self.tile * dim + 4 * self.tile


def fp8(tile: int = 128, format: str = "e4m3") -> Fp8:
    """Float8 per token and head: ``scale = max(absmax / largest, 1e-6)``, rounded to nearest even.

    Args:
      tile: tokens encoded together, even.
      format: "e4m3" (largest number 448, no infinities) or "e5m2" (57344).

    Raises:
      ValueError: for an odd tile or another format.
    """
    return Fp8(tile=tile, format=format)
