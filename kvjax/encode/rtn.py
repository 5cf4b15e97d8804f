"""Round to nearest: keys per channel, values per token, over one tile.

The orientation is KIVI's (arXiv 2402.02750): a key channel keeps its size over many tokens, a value
token does not. The group is the whole tile: C tokens for a key channel, D channels for a value
token.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.encode.base import Encoder, Tile
from kvjax.ops import packing
from kvjax.ops.affine import Affine
from kvjax.ops.rounding import as_rows, quantize_rows


@dataclass(frozen=True)
class Rtn(Encoder):
    """Round to nearest in ``key_bits`` and ``value_bits``; see :func:`rtn`.

    A tile has R rows of M numbers: R = D, M = C for keys and R = C, M = D for values. It holds
    ``codes`` int32 [..., words(R), M] and ``affine`` int32 [..., R], a row's 16-bit scale above its
    16-bit zero.
    """

    key_by_channel: ClassVar[bool] = True
    key_bits: int = 4
    value_bits: int = 4
    meta_dtype: str = "float16"

    def __post_init__(self) -> None:
        super().__post_init__()
        packing.check_bits("key_bits", self.key_bits)
        packing.check_bits("value_bits", self.value_bits)
        packing.check_meta_dtype(self.meta_dtype)

    def bits(self, role: str) -> int:
        """Width of the codes of ``role``."""
        return self.key_bits if role == "key" else self.value_bits

    def shape(self, role: str, dim: int) -> tuple[int, int]:
        """(R, M) of a tile."""
        return (dim, self.tile) if role == "key" else (self.tile, dim)

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        rows = as_rows(self.bounded(x), role)
        codes, scale, zero = quantize_rows(rows, self.bits(role))
        return self.pack_rows(codes, scale, zero, role)

    def bounded(self, x: jax.Array) -> jax.Array:
        """Float32 x within what a 16-bit zero can be: beyond it, numbers become the largest ones
        rather than codes that count from a zero which is not there."""
        largest = float(jnp.finfo(self.meta_dtype).max)
        return jnp.clip(x.astype(jnp.float32), -largest, largest)

    def pack_rows(self, codes: jax.Array, scale: jax.Array, zero: jax.Array, role: str) -> Tile:
        """Codes [..., R, M], scale and zero [..., R, 1] as they are stored."""
        return {
            "codes": packing.pack(codes, self.bits(role)),
            "affine": packing.pack_pair(scale[..., 0], zero[..., 0], self.meta_dtype),
        }

    def format(self, column: bool = False) -> Affine:
        """Rows under a scale and a zero."""
        return Affine(self.tile, self.key_bits, self.value_bits, column, self.meta_dtype)

    def affine(self) -> Affine | None:
        return self.format()

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """``codes`` int32 [..., R, M], ``scale`` and ``zero`` float32 [..., R]."""
        return self.format().unpack(tile, role, dim)

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        return self.format().decode(tile, role, dim)

    def tile_bytes(self, role: str, dim: int) -> int:
        return self.format().tile_bytes(role, dim)


def rtn(
    key_bits: int = 4, value_bits: int = 4, tile: int = 128, meta_dtype: str = "float16"
) -> Rtn:
    """Round to nearest without rotation: a key channel, a value token share scale and zero.

    Args:
      key_bits, value_bits: 1, 2, 3, 4 or 8.
      tile: tokens encoded together, even.
      meta_dtype: "float16" or "bfloat16", for scales and zeros.

    Raises:
      ValueError: for another width, tile or dtype.
    """
    return Rtn(tile=tile, key_bits=key_bits, value_bits=value_bits, meta_dtype=meta_dtype)
