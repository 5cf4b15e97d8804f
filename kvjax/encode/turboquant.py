"""TurboQuant (arXiv 2504.19874): a random rotation, after which every coordinate is nearly normal,
and the best codebook for a normal number.

The rotation Pi and the sketch S of the product variant are drawn inside the compiled program from
the seed. Equal draws in one program are merged by the compiler (one QR for all layers of a step),
and no layer carries a matrix as a constant.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.encode import codebook
from kvjax.encode.base import Encoder, Tile
from kvjax.ops import packing
from kvjax.ops.rounding import as_rows, divide


@dataclass(frozen=True)
class TurboQuant(Encoder):
    """Rotated tokens as codebook entries; see :func:`turboquant`.

    A tile of n channels holds, for the b bits of its entries, ``codes`` int32 [..., words(n), C]
    for keys and [..., words(C), n] for values, and ``norm`` int32 [..., C / 2], the 16-bit norm of
    token i above that of token i + C/2. Under ``product`` keys spend one of their bits on
    ``signs``, laid out as codes are, and ``norm`` int32 [..., C] is a token's norm above that of
    its residual (at 1 bit there are no codes, and ``norm`` is as without). With ``outliers`` = m a
    tile holds two such parts, ``high_`` of m channels with b + 1 bits and ``low_`` of the others,
    and ``outlier`` int32 [..., words(D)], one bit per channel.
    """

    key_bits: int = 3
    value_bits: int = 3
    product: bool = False
    outliers: int = 0
    seed: int = 0
    meta_dtype: str = "float16"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("key_bits", "value_bits"):
            bits = getattr(self, field)
            codebook.check_bits(field, bits)
            if self.outliers and bits == max(codebook.WIDTHS):
                raise ValueError(
                    f"{field}={bits} leaves no bit more for outliers={self.outliers}: "
                    "choose fewer bits, or outliers=0"
                )
        if self.outliers < 0:
            raise ValueError(f"outliers={self.outliers} must be 0 (none) or more")
        packing.check_meta_dtype(self.meta_dtype)

    def validate(self, dim: int) -> None:
        super().validate(dim)
        if dim < 2:
            raise ValueError(f"head_dim={dim} has nothing to rotate: use int8")
        if self.outliers and self.outliers > dim - 2:
            raise ValueError(
                f"outliers={self.outliers} must leave at least 2 of head_dim={dim} channels: "
                "choose fewer"
            )

    def bits(self, role: str) -> int:
        """Bits per number of ``role``, those of outliers and metadata apart."""
        return self.key_bits if role == "key" else self.value_bits

    def centroids(self, bits: int) -> tuple[float, ...]:
        """The codebook for N(0, 1); rotated coordinates of a unit vector are N(0, 1/n)."""
        return codebook.lloyd_max(bits)

    def rotation(self, dim: int) -> jax.Array:
        """Pi, float32 [dim, dim], uniform among orthogonal matrices: y = Pi x.

        The sign of each column is that which makes QR unique, so all back ends draw one matrix.
        """
        gauss = jax.random.normal(jax.random.fold_in(self._key(), dim), (dim, dim), jnp.float32)
        q, r = jnp.linalg.qr(gauss)
        return q * jnp.where(jnp.diagonal(r) < 0, -1.0, 1.0)

    def sketch(self, dim: int) -> jax.Array:
        """The Gaussian S of the product variant, float32 [dim, dim], for rotated residuals.

        The paper's S meets the residual before the rotation; S Pi^T is distributed alike, and
        drawing it at once saves a product.
        """
        key = jax.random.fold_in(jax.random.fold_in(self._key(), dim), 1)
        return jax.random.normal(key, (dim, dim), jnp.float32)

    def _key(self) -> jax.Array:
        return jax.random.key(self.seed)

    def rotate(self, x: jax.Array, role: str) -> jax.Array:
        if self.outliers:  # which channels turn together depends on the tile
            return x
        return _matmul(x.astype(jnp.float32), self.rotation(x.shape[-1]).T)

    def unrotate(self, x: jax.Array, role: str) -> jax.Array:
        if self.outliers:
            return x
        return _matmul(x.astype(jnp.float32), self.rotation(x.shape[-1]))

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        x, bits = x.astype(jnp.float32), self.bits(role)
        if not self.outliers:
            return self._encode_part(self.rotate(x, role), bits, role)
        chosen = largest(jnp.sum(x * x, axis=-2), self.outliers)  # [..., D]
        slots = jnp.arange(x.shape[-1])[:, None]
        source = jnp.argmax(_places(chosen, self.outliers)[..., None, :] == slots, axis=-1)
        x = jnp.take_along_axis(x, source[..., None, :], axis=-1)
        tile = {"outlier": packing.pack(chosen[..., None], 1)[..., 0]}
        for name, part, more in (
            ("high_", x[..., : self.outliers], 1),
            ("low_", x[..., self.outliers :], 0),
        ):
            turned = _matmul(part, self.rotation(part.shape[-1]).T)
            leaves = self._encode_part(turned, bits + more, role)
            tile |= {name + leaf: array for leaf, array in leaves.items()}
        return tile

    def _encode_part(self, x: jax.Array, bits: int, role: str) -> Tile:
        """Rotated x [..., C, n] in ``bits`` bits."""
        sketched, dim = self._sketched(role), x.shape[-1]
        norm = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
        residual = divide(x, norm + 1e-8)
        tile: Tile = {}
        if entry_bits := bits - sketched:
            scaled = residual * jnp.float32(dim**0.5)
            codes = codebook.nearest(scaled, self.centroids(entry_bits))
            residual = residual - self._entries(codes, entry_bits, dim)
            tile["codes"] = packing.pack(as_rows(codes, role), entry_bits)
        if sketched:
            signs = _matmul(residual, self.sketch(dim).T) >= 0
            tile["signs"] = packing.pack(as_rows(signs, role), 1)
        if sketched and entry_bits:
            rest = jnp.sqrt(jnp.sum(residual * residual, axis=-1))
            tile["norm"] = packing.pack_pair(norm[..., 0], rest, self.meta_dtype)
        else:
            tile["norm"] = packing.pack_halves(norm[..., 0], self.meta_dtype)
        return tile

    def _sketched(self, role: str) -> bool:
        return self.product and role == "key"

    def _entries(self, codes: jax.Array, bits: int, dim: int) -> jax.Array:
        return codebook.look_up(codes, self.centroids(bits)) * jnp.float32(dim**-0.5)

    def parts(self, role: str, dim: int) -> tuple[tuple[str, int, int], ...]:
        """(prefix of its leaves, channels, bits) of each part of a tile."""
        bits = self.bits(role)
        if not self.outliers:
            return (("", dim, bits),)
        return ("high_", self.outliers, bits + 1), ("low_", dim - self.outliers, bits)

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """As stored, by part: ``codes`` int32 and ``signs`` int32 0 or 1 [..., C, n], ``norm`` and
        ``residual_norm`` float32 [..., C]; and ``outlier`` int32 0 or 1 [..., D]."""
        plain: Tile = {}
        for name, part_dim, bits in self.parts(role, dim):
            rows = part_dim if role == "key" else self.tile
            entry_bits = bits - self._sketched(role)
            if entry_bits:
                codes = packing.unpack(tile[name + "codes"], entry_bits, rows)
                plain[name + "codes"] = as_rows(codes, role)
            if self._sketched(role):
                signs = packing.unpack(tile[name + "signs"], 1, rows)
                plain[name + "signs"] = as_rows(signs, role)
            if self._sketched(role) and entry_bits:
                norms = packing.unpack_pair(tile[name + "norm"], self.meta_dtype)
                plain[name + "norm"], plain[name + "residual_norm"] = norms
            else:
                plain[name + "norm"] = packing.unpack_halves(tile[name + "norm"], self.meta_dtype)
        if self.outliers:
            plain["outlier"] = packing.unpack(tile["outlier"][..., None], 1, dim)[..., 0]
        return plain

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        plain = self.unpack_tile(tile, role, dim)
        decoded = []
        for name, part_dim, bits in self.parts(role, dim):
            part = self._decode_part(plain, name, part_dim, bits - self._sketched(role))
            decoded.append(_matmul(part, self.rotation(part_dim)) if self.outliers else part)
        if not self.outliers:
            return decoded[0]
        places = _places(plain["outlier"], self.outliers)
        return jnp.take_along_axis(jnp.concatenate(decoded, -1), places[..., None, :], axis=-1)

    def _decode_part(self, plain: Tile, name: str, dim: int, entry_bits: int) -> jax.Array:
        """norm (c + r sqrt(pi/2)/n S^T s), [..., C, n], still rotated (the paper's equation for
        the product variant; without it the codebook entries c alone)."""
        unit: jax.Array | float = 0.0
        if entry_bits:
            unit = self._entries(plain[name + "codes"], entry_bits, dim)
        if name + "signs" in plain:
            signs = plain[name + "signs"].astype(jnp.float32) * 2 - 1
            rest = plain.get(name + "residual_norm")
            back = _matmul(signs, self.sketch(dim)) * jnp.float32((np.pi / 2) ** 0.5 / dim)
            unit = unit + (back if rest is None else back * rest[..., None])
        return plain[name + "norm"][..., None] * unit

    def tile_bytes(self, role: str, dim: int) -> int:
        total = 4 * packing.words(dim, 1) if self.outliers else 0
        for _, part_dim, bits in self.parts(role, dim):
            rows, minor = (part_dim, self.tile) if role == "key" else (self.tile, part_dim)
            split = (bits - 1, 1) if self._sketched(role) else (bits,)
            total += sum(4 * packing.words(rows, b) * minor for b in split)
            total += 4 * self.tile if self._sketched(role) and bits > 1 else 2 * self.tile
        return total


def largest(size: jax.Array, count: int) -> jax.Array:
    """Whether each of [..., D] is one of the ``count`` largest, the first among equals."""
    _, index = lax.top_k(size, count)
    return (index[..., None] == jnp.arange(size.shape[-1])).any(axis=-2)


def _places(chosen: jax.Array, count: int) -> jax.Array:
    """Where each of [..., D] goes once the ``count`` chosen stand first; int32 [..., D]."""
    before = jnp.cumsum(chosen.astype(jnp.int32), axis=-1)
    return jnp.where(chosen, before - 1, count + jnp.arange(chosen.shape[-1]) - before)


def _matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.matmul(x, matrix, precision=lax.Precision.HIGHEST)


def turboquant(
    key_bits: int = 3,
    value_bits: int = 3,
    tile: int = 128,
    product: bool = False,
    outliers: int = 0,
    seed: int = 0,
    meta_dtype: str = "float16",
) -> TurboQuant:
    """TurboQuant per token and head, of any head dim from 2.

    Args:
      key_bits, value_bits: 1, 2, 3 or 4 per number, b + 16 / D with the norm.
      tile: tokens stored together, even. Tokens are encoded apart; only the choice of outliers
        looks at the tile.
      product: keys spend one of their bits on a sketch of the residual (the paper's inner-product
        variant), which makes every score unbiased and noisier: b + 32 / D bits per element. Its
        reader multiplies every decoded key token by a [D, D] matrix.
      outliers: channels of a tile and head, those with the largest squares, that are rotated and
        encoded apart with one bit more, at two norms per token: the paper's fractional bits (32 of
        128 channels at b = 2 are its "2.5"; 2.25 by count). Tiles are then stored unrotated, and
        the reader turns every decoded token back.
      seed: of the rotation and the sketch.
      meta_dtype: "float16" or "bfloat16", for norms.

    Raises:
      ValueError: for another width, tile, number of outliers or dtype; on use, for a head dim with
        fewer than two channels beside the outliers.
    """
    return TurboQuant(
        tile=tile,
        key_bits=key_bits,
        value_bits=value_bits,
        product=product,
        outliers=outliers,
        seed=seed,
        meta_dtype=meta_dtype,
    )
