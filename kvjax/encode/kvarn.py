"""KVarN (arXiv 2606.03458): Hadamard rotation, variance normalisation, rounding.

A few rounds in the manner of Sinkhorn divide the rows and columns of a tile by their standard
deviation, so that one row scale fits all its entries. The row scale is absorbed into the rounding
scale and zero; the column scale (per token for keys, per channel for values) is stored beside.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.encode.base import Tile
from kvjax.encode.rtn import Rtn
from kvjax.ops import hadamard, packing
from kvjax.ops.affine import Affine
from kvjax.ops.rounding import as_rows, divide, quantize_rows

LOG_SCALE_RANGE = (-0.3, 10.0)
STD_RANGE = (1e-3, 1e3)


def balance(rows: jax.Array, iterations: int) -> tuple[jax.Array, jax.Array]:
    """Scales that even out the variances of tiles [..., R, M] float32 (Algorithm 1 of the paper).

    Returns the row scale [..., R, 1] and the column scale [..., 1, M] of the round whose result was
    most even, for each tile apart: later rounds can be worse, and one tile's best round is not
    another's. Both are 1 where no round improved on the tile as it came.
    """
    row_log, col_log = jnp.zeros_like(rows[..., :1]), jnp.zeros_like(rows[..., :1, :])
    row_std, col_std = _std(rows, -1), _std(rows, -2)
    best = (_imbalance(row_std, col_std), row_log, col_log)

    def one_round(_, state):
        row_log, col_log, row_std, col_std, best = state
        col_log = _clip_log(col_log, col_std)
        row_log = _clip_log(row_log, _std(_divide(rows, row_log, col_log), -1))
        current = _divide(rows, row_log, col_log)
        row_std, col_std = _std(current, -1), _std(current, -2)
        imbalance = _imbalance(row_std, col_std)
        better = imbalance <= best[0]
        candidate = (imbalance, row_log, col_log)
        best = tuple(jnp.where(better, new, old) for new, old in zip(candidate, best, strict=True))
        return row_log, col_log, row_std, col_std, best

    state = (row_log, col_log, row_std, col_std, best)
    _, row_log, col_log = lax.fori_loop(0, iterations, one_round, state)[-1]
    return jnp.exp(row_log), jnp.exp(col_log)


def _divide(rows: jax.Array, row_log: jax.Array, col_log: jax.Array) -> jax.Array:
    return rows / jnp.exp(col_log) / jnp.exp(row_log)


def _std(x: jax.Array, axis: int) -> jax.Array:
    return x.std(axis=axis, ddof=1, keepdims=True)


def _clip_log(log_scale: jax.Array, std: jax.Array) -> jax.Array:
    return jnp.clip(log_scale + jnp.log(jnp.clip(std, *STD_RANGE)), *LOG_SCALE_RANGE)


def _imbalance(row_std: jax.Array, col_std: jax.Array) -> jax.Array:
    """Largest over smallest standard deviation, columns plus rows; [..., 1, 1]."""

    def spread(std):
        smallest = jnp.maximum(std.min(axis=(-2, -1), keepdims=True), 1e-8)
        return std.max(axis=(-2, -1), keepdims=True) / smallest

    return spread(col_std) + spread(row_std)


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
        rows = as_rows(self.rotate(x.astype(jnp.float32), role), role)
        size = _tile_std(rows) if self.normalize_tile else jnp.ones((), jnp.float32)
        rows = rows / size
        row_scale, column_scale = balance(rows, self.iterations)
        balanced = _clip_rows(rows / column_scale / row_scale, self.clip)
        codes, scale, zero = quantize_rows(balanced, self.bits(role))
        row_scale = row_scale * size
        scale, zero = scale * row_scale, zero * row_scale
        if self.scale_bits == 8:
            return self._pack8(rows * size, scale, zero, column_scale, role)
        tile = self.pack_rows(codes, scale, zero, role)
        tile["column"] = packing.pack_halves(column_scale[..., 0, :], self.meta_dtype)
        return tile

    def _pack8(
        self, rows: jax.Array, scale: jax.Array, zero: jax.Array, column: jax.Array, role: str
    ) -> Tile:
        """Rows [..., R, M] in codes chosen for the scales as stored: these are off by up to 6 %,
        which codes can make good but for the ends of a row."""
        row8, row_unit = _to_float8(scale[..., 0])
        column8, column_unit = _to_float8(column[..., 0, :])
        scale = row8.astype(jnp.float32) * row_unit
        column = column8.astype(jnp.float32) * column_unit
        steps = divide(
            divide(rows, column[..., None, :]) - zero, jnp.maximum(scale, 1e-30)[..., None]
        )
        codes = jnp.clip(jnp.round(steps), 0, 2 ** self.bits(role) - 1).astype(jnp.int32)
        return {
            "codes": packing.pack(codes, self.bits(role)),
            "row8": row8,
            "column8": column8,
            "zero": packing.pack_halves(zero[..., 0], self.meta_dtype),
            "unit": jnp.concatenate([row_unit, column_unit], axis=-1),
        }

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


def _clip_rows(rows: jax.Array, share: float) -> jax.Array:
    """Rows [..., R, M] without the ``share`` of numbers at each end, which take the end's value."""
    if not share:
        return rows
    ends = jnp.quantile(rows, jnp.asarray([share, 1 - share]), axis=-1, keepdims=True)
    return jnp.clip(rows, ends[0], ends[1])


def _to_float8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positive x [..., n] as float8 [..., n] times a unit [..., 1] that puts the largest at 448.

    Scales reach far beyond the numbers of e4m3 both ways, but in one tile seldom span more than
    its range.
    """
    unit = jnp.maximum(x.max(axis=-1, keepdims=True) / 448, 1e-30)
    return jnp.clip(x / unit, 0, 448).astype(jnp.float8_e4m3fn), unit


def _tile_std(rows: jax.Array) -> jax.Array:
    """Standard deviation of each whole tile, [..., 1, 1]; 1 for a constant tile."""
    largest = jnp.maximum(jnp.abs(rows).max(axis=(-2, -1), keepdims=True), 1e-30)
    std = (rows / largest).std(axis=(-2, -1), keepdims=True)  # squares that cannot overflow
    return jnp.where(std > 1e-6, std * largest, 1.0)


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
