"""The definition: one tile rotated, evened out, rounded and packed in plain jnp. CPUs run this.

KVarN (arXiv 2606.03458): a few rounds in the manner of Sinkhorn divide the rows and columns of a
tile by their standard deviation, so that one row scale fits all its entries. The row scale is
absorbed into the rounding scale and zero; the column scale is stored beside.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.ops import hadamard, packing
from kvjax.ops.affine import Tile
from kvjax.ops.rounding import as_rows, divide, quantize_rows

LOG_SCALE_RANGE = (-0.3, 10.0)
STD_RANGE = (1e-3, 1e3)


@dataclass(frozen=True)
class Kvarn:
    """How KVarN encodes the tiles of one role; the fields are those of `kvjax.encode.kvarn`."""

    bits: int
    iterations: int = 8
    meta_dtype: str = "float16"
    normalize_tile: bool = False
    rotate: bool = True
    clip: float = 0.0
    scale_bits: int = 16


def kvarn_tile(x: jax.Array, role: str, options: Kvarn) -> Tile:
    """Encodes x [..., C, D]; see `kvjax.ops.encode_tile.api.kvarn_tile`."""
    x = x.astype(jnp.float32)
    rows = as_rows(hadamard.rotate(x) if options.rotate else x, role)
    size = tile_std(rows) if options.normalize_tile else jnp.ones((), jnp.float32)
    rows = rows / size
    row_scale, column_scale = balance(rows, options.iterations)
    balanced = _clip_rows(rows / column_scale / row_scale, options.clip)
    codes, scale, zero = quantize_rows(balanced, options.bits)
    row_scale = row_scale * size
    scale, zero = scale * row_scale, zero * row_scale
    if options.scale_bits == 8:
        return _pack8(rows * size, scale, zero, column_scale, options)
    return {
        "codes": packing.pack(codes, options.bits),
        "affine": packing.pack_pair(scale[..., 0], zero[..., 0], options.meta_dtype),
        "column": packing.pack_halves(column_scale[..., 0, :], options.meta_dtype),
    }


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


def _pack8(
    rows: jax.Array, scale: jax.Array, zero: jax.Array, column: jax.Array, options: Kvarn
) -> Tile:
    """Rows [..., R, M] in codes chosen for the scales as stored: these are off by up to 6 %, which
    codes can make good but for the ends of a row."""
    row8, row_unit = _to_float8(scale[..., 0])
    column8, column_unit = _to_float8(column[..., 0, :])
    scale = row8.astype(jnp.float32) * row_unit
    column = column8.astype(jnp.float32) * column_unit
    steps = divide(divide(rows, column[..., None, :]) - zero, jnp.maximum(scale, 1e-30)[..., None])
    codes = jnp.clip(jnp.round(steps), 0, 2**options.bits - 1).astype(jnp.int32)
    return {
        "codes": packing.pack(codes, options.bits),
        "row8": row8,
        "column8": column8,
        "zero": packing.pack_halves(zero[..., 0], options.meta_dtype),
        "unit": jnp.concatenate([row_unit, column_unit], axis=-1),
    }


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


def tile_std(rows: jax.Array) -> jax.Array:
    """Standard deviation of each whole tile, [..., 1, 1]; 1 for a constant tile."""
    largest = jnp.maximum(jnp.abs(rows).max(axis=(-2, -1), keepdims=True), 1e-30)
    std = (rows / largest).std(axis=(-2, -1), keepdims=True)  # squares that cannot overflow
    return jnp.where(std > 1e-6, std * largest, 1.0)
