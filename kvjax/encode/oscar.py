"""OScaR (arXiv 2605.19660): Hadamard rotation, keys divided by their token's norm, rounding in
groups.

The norm takes out what makes one scale unfit for all tokens of a key channel: one pass of what
KVarN iterates. Groups and bits are KIVI's. The zero point is a whole number of steps, as in the
public code, and stored as the number it stands for, so that reading is KIVI's too.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.base import Tile
from kvjax.encode.kivi import Kivi
from kvjax.ops import hadamard, packing
from kvjax.ops.rounding import as_rows, divide


def quantize_whole_zero(rows: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounding of each row of float32 [..., R, M], the zero point a whole number of steps.

    Returns int32 codes [..., R, M], and float32 scale and zero [..., R, 1], with
    ``rows ~ codes * scale + zero``. A row without range keeps its value, where the public code
    divides zero by zero.
    """
    levels = jnp.float32(2**bits - 1)
    low = rows.min(axis=-1, keepdims=True)
    scale = divide(rows.max(axis=-1, keepdims=True) - low, levels)
    flat = scale <= 1e-10
    scale = jnp.where(flat, 1.0, scale)
    point = jnp.round(divide(-low, scale))
    codes = jnp.clip(jnp.round(divide(rows, scale)) + point, 0, levels)
    codes = jnp.where(flat, 0, codes).astype(jnp.int32)
    return codes, scale, jnp.where(flat, low, -point * scale)


@dataclass(frozen=True)
class Oscar(Kivi):
    """Rotated tiles, keys over their norm, rounded in groups; see :func:`oscar`.

    Beside the ``codes`` and ``affine`` of Kivi a key tile holds ``norm`` int32 [..., C / 2]: the
    16-bit norm of token i above that of token i + C/2.
    """

    residual: bool = False
    joint_norm: bool = True

    def validate(self, dim: int) -> None:
        super().validate(dim)
        hadamard.check_dim(dim)

    def rotate(self, x: jax.Array, role: str) -> jax.Array:
        return hadamard.rotate(x)

    def unrotate(self, x: jax.Array, role: str) -> jax.Array:
        return hadamard.rotate(x)

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        x = self.rotate(x.astype(jnp.float32), role)
        norm = self.norm(x) if role == "key" else jnp.ones((), jnp.float32)
        groups = self.grouped(as_rows(self.bounded(divide(x, norm)), role))
        tile = self.pack_groups(*quantize_whole_zero(groups, self.bits(role)), role)
        if role == "key":
            tile["norm"] = packing.pack_halves(norm[..., 0], self.meta_dtype)
        return tile

    def norm(self, x: jax.Array) -> jax.Array:
        """Norm of each token of x [..., K, C, D], as [..., K, C, 1]."""
        axes = (-3, -1) if self.joint_norm and x.ndim > 2 else (-1,)
        squares = jnp.sum(x * x, axis=axes, keepdims=True)
        return jnp.broadcast_to(jnp.sqrt(jnp.maximum(squares, 1e-8)), (*x.shape[:-1], 1))

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """Kivi's, and for keys ``norm`` float32 [..., C]."""
        plain = super().unpack_tile(tile, role, dim)
        if role == "key":
            plain["norm"] = packing.unpack_halves(tile["norm"], self.meta_dtype)
        return plain

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        decoded = super().decode_tile(tile, role, dim)
        if role == "key":
            decoded = decoded * packing.unpack_halves(tile["norm"], self.meta_dtype)[..., None]
        return decoded

    def tile_bytes(self, role: str, dim: int) -> int:
        return super().tile_bytes(role, dim) + (2 * self.tile if role == "key" else 0)


def oscar(
    key_bits: int = 2,
    value_bits: int = 2,
    tile: int = 128,
    group: int = 32,
    meta_dtype: str = "float16",
    joint_norm: bool = True,
) -> Oscar:
    """OScaR, post-RoPE; the head dim is a power of two.

    Args:
      key_bits, value_bits: 1, 2, 3, 4 or 8; the paper has 2.
      tile: tokens encoded together, even, a multiple of ``group``.
      group: tokens (of a key channel) and channels (of a value token) that share scale and zero.
      meta_dtype: "float16" or "bfloat16", for scales, zeros and norms.
      joint_norm: a token's norm is taken over all kv heads, as in the public code; False: each
        head's own. Either way it is stored with each head, 16 bits per token.

    Raises:
      ValueError: for another width, tile, group or dtype; on use, for a head dim that cannot be
        rotated or that the group does not divide.
    """
    return Oscar(
        tile=tile,
        key_bits=key_bits,
        value_bits=value_bits,
        meta_dtype=meta_dtype,
        group=group,
        joint_norm=joint_norm,
    )
