"""Hadamard rotation, then round to nearest: keys per channel or per token, values per token.

Two baselines go by this name. Keys per token is QuaRot's cache (arXiv 2404.00456); keys per channel
over the tile is KIVI's orientation after the rotation.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.base import Tile
from kvjax.encode.rtn import Rtn
from kvjax.ops import hadamard, packing
from kvjax.ops.affine import Affine
from kvjax.ops.rounding import as_rows, quantize_rows

KEY_AXES = ("channel", "token")


@dataclass(frozen=True)
class Rotated(Rtn):
    """Rtn's tiles, stored in the Hadamard matrix's frame."""

    def validate(self, dim: int) -> None:
        super().validate(dim)
        hadamard.check_dim(dim)

    def rotate(self, x: jax.Array, role: str) -> jax.Array:
        return hadamard.rotate(x)

    def unrotate(self, x: jax.Array, role: str) -> jax.Array:
        return hadamard.rotate(x)


@dataclass(frozen=True)
class HadamardRtn(Rotated):
    """Rotated and rounded tiles; see :func:`hadamard_rtn`.

    Holds what Rtn holds. Keys per token are packed as all keys are, ``codes`` int32
    [..., words(D), C], but their ``affine`` int32 [..., C] belongs to the tokens.
    """

    key_axis: str = "channel"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_axis not in KEY_AXES:
            raise ValueError(f"key_axis={self.key_axis!r} is unknown: choose one of {KEY_AXES}")

    def turned(self, role: str) -> bool:
        """Whether the numbers that share a scale lie across those that share a word."""
        return role == "key" and self.key_axis == "token"

    def affine(self) -> Affine | None:
        return None if self.key_axis == "token" else self.format()

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        x = self.bounded(self.rotate(x.astype(jnp.float32), role))
        rows = x if self.turned(role) else as_rows(x, role)
        codes, scale, zero = quantize_rows(rows, self.bits(role))
        codes = as_rows(codes, role) if self.turned(role) else codes
        return self.pack_rows(codes, scale, zero, role)

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """Rtn's; for keys per token R = C and M = D."""
        plain = super().unpack_tile(tile, role, dim)
        if self.turned(role):
            plain["codes"] = as_rows(plain["codes"], role)
        return plain

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        if not self.turned(role):
            return super().decode_tile(tile, role, dim)
        plain = self.unpack_tile(tile, role, dim)
        return plain["codes"] * plain["scale"][..., None] + plain["zero"][..., None]

    def tile_bytes(self, role: str, dim: int) -> int:
        rows, minor = self.shape(role, dim)
        scaled = minor if self.turned(role) else rows
        return 4 * packing.words(rows, self.bits(role)) * minor + 4 * scaled


def hadamard_rtn(
    key_bits: int = 4,
    value_bits: int = 4,
    tile: int = 128,
    key_axis: str = "channel",
    meta_dtype: str = "float16",
) -> HadamardRtn:
    """Round to nearest after a Hadamard rotation; the head dim is a power of two.

    Args:
      key_bits, value_bits: 1, 2, 3, 4 or 8.
      tile: tokens encoded together, even.
      key_axis: "channel": a key channel shares scale and zero over the tile; "token": a key token
        shares them over its channels, as in QuaRot. Value tokens always do.
      meta_dtype: "float16" or "bfloat16", for scales and zeros.

    Raises:
      ValueError: for another width, tile, axis or dtype; on use, for a head dim that cannot be
        rotated.
    """
    return HadamardRtn(
        tile=tile,
        key_bits=key_bits,
        value_bits=value_bits,
        meta_dtype=meta_dtype,
        key_axis=key_axis,
    )
