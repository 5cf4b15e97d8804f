"""The tile format that kernels read: integer codes under a scale and a zero a row."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from kvjax.ops import packing
from kvjax.ops.rounding import as_rows

Tile = dict[str, jax.Array]


@dataclass(frozen=True)
class Affine:
    """A tile of C tokens of head dim D as R rows of M numbers: R = D, M = C for keys, R = C, M = D
    for values. It holds ``codes`` int32 [..., words(R), M] (see `packing`), ``affine`` int32
    [..., R], a row's 16-bit scale above its 16-bit zero, and with `column` a second scaling
    ``column`` int32 [..., M/2], the 16-bit factor of entry i above that of entry i + M/2:

        x[r, m] = (codes[r, m] * scale[r] + zero[r]) * column[m]

    Attributes:
      tile: C, tokens.
      key_bits, value_bits: 1, 2, 3, 4 or 8.
      column: whether tiles have the second scaling (KVarN).
      meta_dtype: "float16" or "bfloat16", of scales, zeros and factors.
    """

    tile: int
    key_bits: int
    value_bits: int
    column: bool
    meta_dtype: str

    def bits(self, role: str) -> int:
        """Width of the codes of ``role``, "key" or "value"."""
        return self.key_bits if role == "key" else self.value_bits

    def shape(self, role: str, dim: int) -> tuple[int, int]:
        """(R, M) of a tile."""
        return (dim, self.tile) if role == "key" else (self.tile, dim)

    def unpack(self, tile: Tile, role: str, dim: int) -> Tile:
        """``codes`` int32 [..., R, M], ``scale`` and ``zero`` float32 [..., R], and with `column`
        ``column`` float32 [..., M]."""
        codes = packing.unpack(tile["codes"], self.bits(role), self.shape(role, dim)[0])
        scale, zero = packing.unpack_pair(tile["affine"], self.meta_dtype)
        plain = {"codes": codes, "scale": scale, "zero": zero}
        if self.column:
            plain["column"] = packing.unpack_halves(tile["column"], self.meta_dtype)
        return plain

    def decode(self, tile: Tile, role: str, dim: int) -> jax.Array:
        """The float32 [..., C, D] that ``tile`` stands for."""
        plain = self.unpack(tile, role, dim)
        rows = plain["codes"].astype("float32") * plain["scale"][..., None]
        rows = rows + plain["zero"][..., None]
        if self.column:
            rows = rows * plain["column"][..., None, :]
        return as_rows(rows, role)

    def tile_bytes(self, role: str, dim: int) -> int:
        """Bytes of one tile of one kv head."""
        rows, minor = self.shape(role, dim)
        column = 2 * minor if self.column else 0
        return 4 * packing.words(rows, self.bits(role)) * minor + 4 * rows + column
