"""Four bits per number, symmetric, one scale per token and head, for keys and values alike.

The four-bit sibling of int8, without zero point or rotation: 4 + 16 / D bits per element.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.base import Encoder, Tile, check_role
from kvjax.ops import packing
from kvjax.ops.rounding import as_rows, divide

LARGEST = 7
OFFSET = 8  # packed codes are unsigned


@dataclass(frozen=True)
class Int4(Encoder):
    """Holds ``codes`` and ``scale``; see :func:`int4`.

    ``codes`` int32 [..., D / 8, C] for keys and [..., C / 8, D] for values (eight to a word, padded
    up), ``scale`` int32 [..., C / 2]: the 16-bit scale of token i above that of token i + C/2.
    """

    meta_dtype: str = "float16"

    def __post_init__(self) -> None:
        super().__post_init__()
        packing.check_meta_dtype(self.meta_dtype)

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        x = x.astype(jnp.float32)
        scale = jnp.maximum(divide(jnp.abs(x).max(axis=-1), jnp.float32(LARGEST)), 1e-6)
        codes = jnp.clip(jnp.round(divide(x, scale[..., None])), -LARGEST, LARGEST)
        codes = as_rows(codes.astype(jnp.int32) + OFFSET, role)
        return {
            "codes": packing.pack(codes, 4),
            "scale": packing.pack_halves(scale, self.meta_dtype),
        }

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """``codes`` int32 [..., C, D] in -7 ... 7, ``scale`` float32 [..., C]."""
        check_role(role)
        rows = dim if role == "key" else self.tile
        codes = packing.unpack(tile["codes"], 4, rows) - OFFSET
        scale = packing.unpack_halves(tile["scale"], self.meta_dtype)
        return {"codes": as_rows(codes, role), "scale": scale}

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        plain = self.unpack_tile(tile, role, dim)
        return plain["codes"].astype(jnp.float32) * plain["scale"][..., None]

    def tile_bytes(self, role: str, dim: int) -> int:
        check_role(role)
        rows, minor = (dim, self.tile) if role == "key" else (self.tile, dim)
        return 4 * packing.words(rows, 4) * minor + 2 * self.tile


def int4(tile: int = 128, meta_dtype: str = "float16") -> Int4:
    """Symmetric int4 per token and head: ``scale = max(absmax / 7, 1e-6)``, code rounded.

    Args:
      tile: tokens encoded together, even.
      meta_dtype: "float16" or "bfloat16", for the scales.

    Raises:
      ValueError: for an odd tile or another dtype.
    """
    return Int4(tile=tile, meta_dtype=meta_dtype)
