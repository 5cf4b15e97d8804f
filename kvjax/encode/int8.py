"""Eight bits per number, one symmetric scale per token and head: the common baseline.

The code is rounded. Public kernels that store a float into int8 truncate and double the error.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.base import Encoder, Tile, check_role
from kvjax.ops.rounding import divide


@dataclass(frozen=True)
class Int8(Encoder):
    """Holds ``codes`` int8 [..., C, D] and ``scale`` float32 [..., C]; see :func:`int8`."""

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        x = x.astype(jnp.float32)
        # The floor keeps the scale of a zero token positive; its codes are 0 all the same.
        scale = jnp.maximum(divide(jnp.abs(x).max(axis=-1), jnp.float32(127)), 1e-6)
        codes = jnp.clip(jnp.round(x * (1 / scale[..., None])), -127, 127)
        return {"codes": codes.astype(jnp.int8), "scale": scale}

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """``codes`` int8 [..., C, D], ``scale`` float32 [..., C]: what is stored."""
        check_role(role)
        return tile

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        check_role(role)
        return tile["codes"].astype(jnp.float32) * tile["scale"][..., None]

    def tile_bytes(self, role: str, dim: int) -> int:
        check_role(role)
        return self.tile * dim + 4 * self.tile


def int8(tile: int = 128) -> Int8:
    """Symmetric int8 per token and head: ``scale = max(absmax / 127, 1e-6)``, code rounded.

    Raises:
      ValueError: for an odd tile.
    """
    return Int8(tile=tile)
