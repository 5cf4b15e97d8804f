"""KVarN (arXiv 2606.03458): Hadamard rotation, variance normalisation, rounding.

A few rounds in the manner of Sinkhorn divide the rows and columns of a tile by their standard
deviation, so that one row scale fits all its entries. The row scale is absorbed into the rounding
scale and zero; the column scale (per token for keys, per channel for values) is stored beside.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.base import Tile
from kvjax.encode.rtn import Rtn
from kvjax.ops import hadamard, packing
from kvjax.ops.affine import Affine
from kvjax.ops.encode_tile.api import kvarn_tile
from kvjax.ops.encode_tile.reference import Kvarn
from kvjax.ops.rounding import as_rows


@dataclass(frozen=True)
class KVarN(Rtn):
    """Rotated, balanced and rounded tiles; see :func:`kvarn`.

    Beside the ``codes`` and ``affine`` of Rtn a tile holds ``column`` int32 [..., M/2]: the 16-bit
    column scale of entry i above that of entry i + M/2. With 8-bit scales it holds ``codes``,
    ``row8`` float8 [..., R] and ``column8`` float8 [..., M], ``zero`` int32 [..., R/2] with the
    16-bit zero of row i above that of row i + R/2, and ``unit`` float32 [..., 2], what 1.0 stands
    for among the row scales and among the column scales.
    """

    key_bits: int = 2
    value_bits: int = 2
    iterations: int = 8
    normalize_tile: bool = False
    rotation: bool = True
    clip: float = 0.0
    scale_bits: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 0:
            raise ValueError(f"iterations={self.iterations} must be 0 or more (the paper uses 8)")
        if not 0 <= self.clip < 0.5:
            raise ValueError(f"clip={self.clip} must be from 0 (none) to below 0.5, such as 0.005")
        if self.scale_bits not in (8, 16):
            raise ValueError(f"scale_bits={self.scale_bits} is not supported: choose 8 or 16")

    def validate(self, dim: int) -> None:
        super().validate(dim)
        if self.rotation:
            hadamard.check_dim(dim)
        elif dim % 2:
            raise ValueError(f"head_dim={dim} is odd, which kvarn cannot pack: use rtn or int8")

    def rotate(self, x: jax.Array, role: str) -> jax.Array:
        return hadamard.rotate(x) if self.rotation else x

    def unrotate(self, x: jax.Array, role: str) -> jax.Array:
        return self.rotate(x, role)

    def affine(self) -> Affine | None:
        return self.format(column=True) if self.scale_bits == 16 else None

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        return kvarn_tile(x, role, self.options(role))

    def options(self, role: str) -> Kvarn:
        """What the op needs to know."""
        return Kvarn(
            bits=self.bits(role),
            iterations=self.iterations,
            meta_dtype=self.meta_dtype,
            normalize_tile=self.normalize_tile,
            rotate=self.rotation,
            clip=self.clip,
            scale_bits=self.scale_bits,
        )

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """Rtn's, and ``column`` float32 [..., M]."""
        if self.scale_bits == 8:
            row_unit, column_unit = jnp.split(tile["unit"], 2, axis=-1)
            return {
                "codes": packing.unpack(tile["codes"], self.bits(role), self.shape(role, dim)[0]),
                "scale": tile["row8"].astype(jnp.float32) * row_unit,
                "zero": packing.unpack_halves(tile["zero"], self.meta_dtype),
                "column": tile["column8"].astype(jnp.float32) * column_unit,
            }
        return self.format(column=True).unpack(tile, role, dim)

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        if self.scale_bits == 16:
            return self.format(column=True).decode(tile, role, dim)
        plain = self.unpack_tile(tile, role, dim)
        rows = plain["codes"].astype(jnp.float32) * plain["scale"][..., None]
        return as_rows((rows + plain["zero"][..., None]) * plain["column"][..., None, :], role)

    def tile_bytes(self, role: str, dim: int) -> int:
        if self.scale_bits == 16:
            return self.format(column=True).tile_bytes(role, dim)
        rows, minor = self.shape(role, dim)
        return 4 * packing.words(rows, self.bits(role)) * minor + 3 * rows + minor + 8


def kvarn(
    key_bits: int = 2,
    value_bits: int = 2,
    tile: int = 128,
    iterations: int = 8,
    meta_dtype: str = "float16",
    normalize_tile: bool = False,
    rotate: bool = True,
    clip: float = 0.0,
    scale_bits: int = 16,
) -> KVarN:
    """KVarN, post-RoPE, keys per channel and values per token; the head dim is a power of two.

    Args:
      key_bits, value_bits: 1, 2, 3, 4 or 8.
      tile: tokens encoded together, even; the paper has 128.
      iterations: rounds of variance normalisation.
      meta_dtype: "float16" or "bfloat16", for scales and zeros.
      normalize_tile: divide a tile by its standard deviation first. The reference (False) never
        scales down below exp(-0.3), so that tiles much smaller than 1 are not balanced at all.
      rotate: False takes its input as rotated already.
      clip: share of a row that is left out at each end of its range, such as 0.005; the public code
        has this as an option for 2 bits.
      scale_bits: 16, as the public code, or 8: both scales in float8 e4m3 under a float32 unit a
        tile, zeros in ``meta_dtype``. That is the paper's count, b + 1/4 bits per element at 128 by
        128 (and 1/256 for the units). Codes are chosen for the rounded scales.

    Raises:
      ValueError: for another width, tile, dtype or clip; on use, for a head dim that cannot be
        rotated.
    """
    return KVarN(
        tile=tile,
        key_bits=key_bits,
        value_bits=value_bits,
        meta_dtype=meta_dtype,
        iterations=iterations,
        normalize_tile=normalize_tile,
        rotation=rotate,
        clip=clip,
        scale_bits=scale_bits,
    )
