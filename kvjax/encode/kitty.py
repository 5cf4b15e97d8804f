"""Kitty (arXiv 2511.18643): KIVI's orientation over whole tiles, and more bits for the largest key
channels.

A boosted channel's code is stored in halves: its high bits stand where every channel's code stands,
its low bits in a block beside, so that nothing has to be put in another order.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.base import Tile
from kvjax.encode.rtn import Rtn
from kvjax.encode.turboquant import largest
from kvjax.ops import packing
from kvjax.ops.affine import Affine
from kvjax.ops.rounding import as_rows, quantize_rows


@dataclass(frozen=True)
class Kitty(Rtn):
    """Rounded tiles with boosted key channels; see :func:`kitty`.

    Beside the ``codes`` and ``affine`` of Rtn a key tile holds ``boosted`` int32 [..., words(D)],
    one bit per channel, and ``low`` int32 [..., words(C), n], the low halves of the codes of the n
    boosted channels in their order, tokens packed (n may be too few to fill a word).
    """

    key_bits: int = 2
    value_bits: int = 2
    share: float = 0.125
    residual: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if 2 * self.key_bits not in packing.WIDTHS:
            raise ValueError(
                f"key_bits={self.key_bits} is not supported, for boosted channels have twice as "
                "many: choose one of (1, 2, 4)"
            )
        if not 0 < self.share < 1:
            raise ValueError(f"share={self.share} must be between 0 and 1: 0.125, as the paper")

    def validate(self, dim: int) -> None:
        super().validate(dim)
        if not self.count(dim):
            raise ValueError(
                f"share={self.share} of head_dim={dim} is not one channel: choose a larger share"
            )

    def count(self, dim: int) -> int:
        """n, how many channels of a tile are boosted."""
        return int(dim * self.share)

    def affine(self) -> Affine | None:
        return None

    @property
    def keeps_values(self) -> bool:
        return self.residual

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        if role != "key":
            return super().encode_tile(x, role)
        self.check_tile(x, role)
        rows, bits = as_rows(self.bounded(x), role), self.key_bits
        boosted = largest(jnp.abs(rows).mean(axis=-1), self.count(x.shape[-1]))  # [..., D]
        codes, scale, zero = quantize_rows(rows, bits)
        fine, fine_scale, _ = quantize_rows(rows, 2 * bits)
        codes = jnp.where(boosted[..., None], fine >> bits, codes)
        scale = jnp.where(boosted[..., None], fine_scale, scale)
        tile = self.pack_rows(codes, scale, zero, role)
        tile["boosted"] = packing.pack(boosted[..., None], 1)[..., 0]
        first = jnp.argsort(~boosted, axis=-1, stable=True)[..., : self.count(x.shape[-1])]
        low = jnp.take_along_axis(fine, first[..., None], axis=-2) & (2**bits - 1)
        return tile | {"low": packing.pack(low.swapaxes(-1, -2), bits)}

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """Rtn's with all bits of a code, and for keys ``boosted`` int32 0 or 1 [..., D]."""
        plain = super().unpack_tile(tile, role, dim)
        if role == "key":
            boosted = packing.unpack(tile["boosted"][..., None], 1, dim)[..., 0]
            low = packing.unpack(tile["low"], self.key_bits, self.tile).swapaxes(-1, -2)
            place = jnp.maximum(jnp.cumsum(boosted, axis=-1) - 1, 0)
            low = jnp.take_along_axis(low, place[..., None], axis=-2)
            whole = (plain["codes"] << self.key_bits) + low
            plain["codes"] = jnp.where(boosted[..., None] > 0, whole, plain["codes"])
            plain["boosted"] = boosted
        return plain

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        if role != "key":
            return super().decode_tile(tile, role, dim)
        plain = self.unpack_tile(tile, role, dim)
        rows = plain["codes"].astype(jnp.float32) * plain["scale"][..., None]
        return as_rows(rows + plain["zero"][..., None], role)

    def tile_bytes(self, role: str, dim: int) -> int:
        total = super().tile_bytes(role, dim)
        if role == "key":
            total += 4 * packing.words(self.tile, self.key_bits) * self.count(dim)
            total += 4 * packing.words(dim, 1)
        return total


def kitty(
    key_bits: int = 2,
    value_bits: int = 2,
    tile: int = 128,
    share: float = 0.125,
    meta_dtype: str = "float16",
    residual: bool = True,
) -> Kitty:
    """Kitty, post-RoPE, without rotation: at 128 tokens 2.51 bits per key element.

    Keys are rounded per channel over the tile, values per token over the head dim. The channels of
    a tile and head with the largest mean of absolute values have twice ``key_bits``. The paper's
    cache also keeps its first 32 tokens exact: ``kvjax.cache(encode=kitty(), sink=32)``.

    Args:
      key_bits: 1, 2 or 4; the paper has 2.
      value_bits: 1, 2, 3, 4 or 8.
      tile: tokens encoded together, even; the paper's page is 128.
      share: of the channels that are boosted; the paper has 0.125, and 0.25 as "Pro".
      meta_dtype: "float16" or "bfloat16", for scales and zeros.
      residual: the newest ``tile`` values stay exact, as in the paper's local window; False:
        values leave the exact window with their tile, as keys do.

    Raises:
      ValueError: for another width, tile, share or dtype; on use, where the share of the head dim
        is not one channel.
    """
    return Kitty(
        tile=tile,
        key_bits=key_bits,
        value_bits=value_bits,
        meta_dtype=meta_dtype,
        share=share,
        residual=residual,
    )
