"""TurboQuant as vLLM ships it: Hadamard rotation, no sketch, and norms corrected.

Keys are codebook entries; the entries of a token are divided by their own norm on reading, so that
the stored norm is the norm. Values are not rotated, and rounded per token to evenly spaced levels.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode import codebook
from kvjax.encode.base import Tile
from kvjax.encode.rtn import Rtn
from kvjax.ops import hadamard, packing
from kvjax.ops.affine import Affine
from kvjax.ops.rounding import as_rows, divide


@dataclass(frozen=True)
class TurboQuantNc(Rtn):
    """Keys by codebook, values in even steps; see :func:`turboquant_nc`.

    A key tile holds ``codes`` int32 [..., words(D), C] and ``norm`` int32 [..., C / 2], the 16-bit
    norm of token i above that of token i + C/2; a value tile holds what Rtn's does.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        codebook.check_bits("key_bits", self.key_bits)

    def validate(self, dim: int) -> None:
        super().validate(dim)
        hadamard.check_dim(dim)

    def affine(self) -> Affine | None:
        return None

    def centroids(self, bits: int) -> tuple[float, ...]:
        """The codebook for N(0, 1)."""
        return codebook.lloyd_max(bits)

    def rotate(self, x: jax.Array, role: str) -> jax.Array:
        return hadamard.rotate(x) if role == "key" else x

    def unrotate(self, x: jax.Array, role: str) -> jax.Array:
        return self.rotate(x, role)

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        x = self.rotate(x.astype(jnp.float32), role)
        if role == "value":
            return self.pack_rows(*_round_half_up(self.bounded(x), self.value_bits), role)
        norm = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
        unit = divide(x, norm + 1e-8) * jnp.float32(x.shape[-1] ** 0.5)
        codes = codebook.nearest(unit, self.centroids(self.key_bits))
        return {
            "codes": packing.pack(as_rows(codes, role), self.key_bits),
            "norm": packing.pack_halves(norm[..., 0], self.meta_dtype),
        }

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """Keys: ``codes`` int32 [..., C, D], ``norm`` float32 [..., C]. Values: as Rtn."""
        if role == "value":
            return super().unpack_tile(tile, role, dim)
        codes = packing.unpack(tile["codes"], self.key_bits, dim)
        norm = packing.unpack_halves(tile["norm"], self.meta_dtype)
        return {"codes": as_rows(codes, role), "norm": norm}

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        if role == "value":
            return super().decode_tile(tile, role, dim)
        plain = self.unpack_tile(tile, role, dim)
        entries = codebook.look_up(plain["codes"], self.centroids(self.key_bits))
        # No codebook has a zero, so the norm of the entries is positive.
        size = jnp.sqrt(jnp.sum(entries * entries, axis=-1))
        return entries * (plain["norm"] / size)[..., None]

    def tile_bytes(self, role: str, dim: int) -> int:
        if role == "value":
            return super().tile_bytes(role, dim)
        return 4 * packing.words(dim, self.key_bits) * self.tile + 2 * self.tile


def _round_half_up(rows: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``quantize_rows``, but halves go up and no step is below 1e-8, as in vLLM."""
    levels = jnp.float32(2**bits - 1)
    zero = rows.min(axis=-1, keepdims=True)
    scale = jnp.maximum(divide(rows.max(axis=-1, keepdims=True) - zero, levels), 1e-8)
    codes = jnp.clip(jnp.floor(divide(rows - zero, scale) + 0.5), 0, levels)
    return codes.astype(jnp.int32), scale, zero


def turboquant_nc(
    key_bits: int = 4, value_bits: int = 4, tile: int = 128, meta_dtype: str = "float16"
) -> TurboQuantNc:
    """vLLM's TurboQuant; its presets 4bit_nc, k3v4_nc and 3bit_nc are (4, 4), (3, 4) and (3, 3).

    Args:
      key_bits: 1, 2, 3 or 4; with the norm b + 16 / D bits per element.
      value_bits: 1, 2, 3, 4 or 8; with scale and zero b + 32 / D bits per element.
      tile: tokens stored together, even; each is encoded apart.
      meta_dtype: "float16" or "bfloat16", for norms, scales and zeros.

    Raises:
      ValueError: for another width, tile or dtype; on use, for a head dim that is no power of two.
    """
    return TurboQuantNc(tile=tile, key_bits=key_bits, value_bits=value_bits, meta_dtype=meta_dtype)
