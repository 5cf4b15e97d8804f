"""KIVI (arXiv 2402.02750): keys per channel in groups of tokens, values per token in groups of
channels.

Groups lie inside a tile, so a tile holds what KIVI computes for the same tokens. Keys leave the
exact window by the tile of R tokens, values one by one: the newest R are read exact. Here a value
is encoded with its tile, which gives it the codes that it would get later, for values are rounded
token by token.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.base import Tile
from kvjax.encode.rtn import Rtn
from kvjax.ops import packing
from kvjax.ops.affine import Affine
from kvjax.ops.rounding import as_rows, quantize_rows


@dataclass(frozen=True)
class Kivi(Rtn):
    """Tiles rounded in groups; see :func:`kivi`.

    A tile has the R rows of M numbers of Rtn, each split into M / group groups. It holds ``codes``
    int32 [..., words(R), M] and ``affine`` int32 [..., M / group, R], a group's 16-bit scale above
    its 16-bit zero.
    """

    key_bits: int = 2
    value_bits: int = 2
    group: int = 32
    residual: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group < 2:
            raise ValueError(f"group={self.group} must be at least 2: choose one such as 32")
        if self.tile % self.group:
            raise ValueError(
                f"tile={self.tile} is not a multiple of group={self.group}, the tokens that share "
                f"a key scale: choose another tile, such as {4 * self.group}, or group"
            )

    def validate(self, dim: int) -> None:
        super().validate(dim)
        if dim % self.group:
            raise ValueError(
                f"head_dim={dim} is not a multiple of group={self.group}, the channels that share "
                "a value scale: choose a group that divides it, or use rtn"
            )

    def affine(self) -> Affine | None:
        return None

    @property
    def keeps_values(self) -> bool:
        return self.residual

    def grouped(self, rows: jax.Array) -> jax.Array:
        """[..., R, M] as [..., R, M / group, group]."""
        return rows.reshape(*rows.shape[:-1], rows.shape[-1] // self.group, self.group)

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        groups = self.grouped(as_rows(self.bounded(x), role))
        return self.pack_groups(*quantize_rows(groups, self.bits(role)), role)

    def pack_groups(self, codes: jax.Array, scale: jax.Array, zero: jax.Array, role: str) -> Tile:
        """Codes [..., R, M / group, group], scale and zero [..., R, M / group, 1] as stored."""
        codes = codes.reshape(*codes.shape[:-2], -1)
        affine = packing.pack_pair(scale[..., 0], zero[..., 0], self.meta_dtype)
        return {
            "codes": packing.pack(codes, self.bits(role)),
            "affine": affine.swapaxes(-1, -2),
        }

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """``codes`` int32 [..., R, M], ``scale`` and ``zero`` float32 [..., R, M / group]."""
        codes = packing.unpack(tile["codes"], self.bits(role), self.shape(role, dim)[0])
        scale, zero = packing.unpack_pair(tile["affine"].swapaxes(-1, -2), self.meta_dtype)
        return {"codes": codes, "scale": scale, "zero": zero}

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        plain = self.unpack_tile(tile, role, dim)
        groups = self.grouped(plain["codes"].astype(jnp.float32))
        groups = groups * plain["scale"][..., None] + plain["zero"][..., None]
        return as_rows(groups.reshape(plain["codes"].shape), role)

    def tile_bytes(self, role: str, dim: int) -> int:
        rows, minor = self.shape(role, dim)
        words = packing.words(rows, self.bits(role)) * minor
        return 4 * (words + rows * (minor // self.group))


def kivi(
    key_bits: int = 2,
    value_bits: int = 2,
    tile: int = 128,
    group: int = 32,
    meta_dtype: str = "float16",
    residual: bool = True,
) -> Kivi:
    """KIVI's rounding: ``key_bits + 32 / group`` bits per element, likewise for values.

    Args:
      key_bits, value_bits: 1, 2, 3, 4 or 8; the paper has 2 and 4.
      tile: tokens encoded together, even, a multiple of ``group``; the paper's residual is 128.
      group: tokens (of a key channel) and channels (of a value token) that share scale and zero.
      meta_dtype: "float16" or "bfloat16", for scales and zeros.
      residual: the newest ``tile`` values stay exact, as in the paper; False: values leave the
        exact window with their tile, as keys do.

    Raises:
      ValueError: for another width, tile, group or dtype; on use, for a head dim that the group
        does not divide.
    """
    return Kivi(
        tile=tile,
        key_bits=key_bits,
        value_bits=value_bits,
        meta_dtype=meta_dtype,
        group=group,
        residual=residual,
    )
