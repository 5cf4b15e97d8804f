"""The definition of Heed's tiles: rows fitted by least squares, in turn, each making good what the
rows before it got wrong. See `kvjax.encode.heed` for the derivation."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.ops import hadamard, packing
from kvjax.ops.affine import Tile
from kvjax.ops.rounding import as_rows

CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6)  # shares of a row's range that are tried
DAMPING = 0.05  # of the mean query power, on the diagonal
Fitted = tuple[jax.Array, jax.Array]  # codes int32 [..., M], affine int32 [...]


@dataclass(frozen=True)
class Heed:
    """How Heed encodes the tiles of one role; the fields are those of `kvjax.encode.heed`."""

    bits: int
    meta_dtype: str = "float16"
    feedback: bool = True
    coupling: float = 0.05


def heed_tile(x: jax.Array, role: str, options: Heed, query: jax.Array | None) -> Tile:
    """Encodes x [..., C, D] for query [..., n, D]; see `kvjax.ops.encode_tile.api.heed_tile`."""
    rows = as_rows(hadamard.rotate(x), role)
    if role == "value" and options.feedback and options.coupling:
        codes, affine = values_in_turn(rows, options)
    elif role == "key" and options.feedback and query is not None:
        order, factor = order_and_factor(hadamard.rotate(query))
        codes, affine = keys_in_turn(rows, order, factor, options)
    else:
        codes, affine = fit_row(rows, options)
    return {"codes": packing.pack(codes, options.bits), "affine": affine}


def fit_row(row: jax.Array, options: Heed) -> Fitted:
    """Rows [..., M] in the codes of the best of five clipped ranges, under the scale and zero that
    fit those codes best, as stored."""
    low, high = row.min(axis=-1, keepdims=True), row.max(axis=-1, keepdims=True)
    middle, half = (low + high) / 2, (high - low) / 2
    found = [_fit_range(row, middle, half * clip, options) for clip in CLIPS]
    error, codes, affine = found[0]
    for e, c, a in found[1:]:
        better = e < error
        error = jnp.where(better, e, error)
        codes, affine = jnp.where(better[..., None], c, codes), jnp.where(better, a, affine)
    return codes, affine


def _fit_range(
    row: jax.Array, middle: jax.Array, half: jax.Array, options: Heed
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Squared error [...], codes [..., M] and affine [...] of rows cut to middle ± half."""
    levels = 2**options.bits - 1
    step = jnp.maximum(2 * half / levels, 1e-10)
    codes = jnp.clip(jnp.round((row - (middle - half)) * (1 / step)), 0, levels)
    # Least squares of the row on its codes; both are taken about their means.
    mean, center = codes.mean(axis=-1, keepdims=True), row.mean(axis=-1, keepdims=True)
    apart = codes - mean
    power = (apart * apart).sum(axis=-1, keepdims=True)
    slope = (apart * (row - center)).sum(axis=-1, keepdims=True) / jnp.maximum(power, 1e-10)
    # One code for all numbers: they are one number, or so nearly that the scale has no meaning.
    scale = jnp.where(power > 0, slope, step)
    affine = packing.pack_pair(scale[..., 0], (center - scale * mean)[..., 0], options.meta_dtype)
    error = row - decoded(codes, affine, options)
    return (error * error).sum(axis=-1), codes.astype(jnp.int32), affine


def decoded(codes: jax.Array, affine: jax.Array, options: Heed) -> jax.Array:
    """What codes [..., M] under affine [...] stand for, float32 [..., M]."""
    scale, zero = packing.unpack_pair(affine, options.meta_dtype)
    return codes * scale[..., None] + zero[..., None]


def order_and_factor(query: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Channels by falling query power, int32 [..., D], and the unit upper triangular F [..., D, D]
    of C = F diag Fᵀ in that order, C the damped mean of q qᵀ over query [..., n, D]."""
    power = jnp.einsum("...nd,...ne->...de", query, query, precision=lax.Precision.HIGHEST)
    mean = jnp.trace(power, axis1=-2, axis2=-1)[..., None, None] / power.shape[-1]
    power = power / jnp.maximum(mean, 1e-30) + DAMPING * jnp.eye(power.shape[-1])
    order = jnp.argsort(-jnp.diagonal(power, axis1=-2, axis2=-1), axis=-1)
    power = jnp.take_along_axis(power, order[..., None], axis=-2)
    power = jnp.take_along_axis(power, order[..., None, :], axis=-1)
    # Cholesky's factor is lower triangular; of the matrix turned round, it is the upper one.
    upper = jnp.linalg.cholesky(power[..., ::-1, ::-1])[..., ::-1, ::-1]
    return order, upper / jnp.diagonal(upper, axis1=-2, axis2=-1)[..., None, :]


def keys_in_turn(rows: jax.Array, order: jax.Array, factor: jax.Array, options: Heed) -> Fitted:
    """Codes [..., D, C] and affine [..., D] of key channels [..., D, C], each fitted to itself plus
    Σ_j F_ji (k_j − k̂_j) over the channels j before it."""
    rows = jnp.take_along_axis(rows, order[..., None], axis=-2)
    channels = rows.shape[-2]

    def one(i: jax.Array, state: tuple) -> tuple:
        errors, codes, affine = state
        weight = lax.dynamic_index_in_dim(factor, i, -1, keepdims=False)
        row = lax.dynamic_index_in_dim(rows, i, -2, keepdims=False)
        # The errors of channels still to come are 0.
        target = row + (weight[..., None] * errors).sum(axis=-2)
        code, meta = fit_row(target, options)
        error = row - decoded(code, meta, options)
        return (
            lax.dynamic_update_index_in_dim(errors, error, i, errors.ndim - 2),
            lax.dynamic_update_index_in_dim(codes, code, i, codes.ndim - 2),
            lax.dynamic_update_index_in_dim(affine, meta, i, affine.ndim - 1),
        )

    empty = jnp.zeros_like(rows), jnp.zeros(rows.shape, jnp.int32)
    state = (*empty, jnp.zeros(rows.shape[:-1], jnp.int32))
    _, codes, affine = lax.fori_loop(0, channels, one, state)
    back = jnp.argsort(order, axis=-1)
    return (
        jnp.take_along_axis(codes, back[..., None], axis=-2),
        jnp.take_along_axis(affine, back, axis=-1),
    )


def values_in_turn(rows: jax.Array, options: Heed) -> Fitted:
    """Codes [..., C, D] and affine [..., C] of value tokens [..., C, D], each fitted to itself plus
    a share of the sum of the errors before it."""
    tokens, mu = rows.shape[-2], options.coupling
    shares = mu / (1 + mu * jnp.arange(tokens, 0, -1, dtype=jnp.float32))

    def one(total: jax.Array, at: tuple) -> tuple[jax.Array, Fitted]:
        row, share = at
        # A row without range, such as a zero token's, can be exact, and stays so.
        ranged = row.max(axis=-1, keepdims=True) > row.min(axis=-1, keepdims=True)
        code, affine = fit_row(row + jnp.where(ranged, share * total, 0), options)
        return total + (row - decoded(code, affine, options)), (code, affine)

    turned = jnp.moveaxis(rows, -2, 0)
    _, (codes, affine) = lax.scan(one, jnp.zeros_like(turned[0]), (turned, shares))
    return jnp.moveaxis(codes, 0, -2), jnp.moveaxis(affine, 0, -1)
