"""The definition of Heed's tiles: rows fitted by least squares, in turn, each making good what the
others got wrong. See `kvjax.encode.heed` for the derivation."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.ops import hadamard, packing
from kvjax.ops.affine import Tile
from kvjax.ops.rounding import as_rows

DAMPING = 0.05  # of the mean power, on the diagonal
Fitted = tuple[jax.Array, jax.Array]  # codes int32 [..., M], affine int32 [...]


@dataclass(frozen=True)
class Heed:
    """How Heed encodes the tiles of one role; the fields are those of `kvjax.encode.heed`."""

    bits: int
    meta_dtype: str = "float16"
    feedback: bool = True
    sweeps: int = 2
    own_share: float = 0.5
    coupling: float = 0.05

    @property
    def clips(self) -> tuple[float, ...]:
        """Shares of a row's range that are tried; few levels never span the whole of it."""
        return (0.9, 0.8, 0.7, 0.6, 0.5) if self.bits <= 2 else (1.0, 0.9, 0.8, 0.7, 0.6)


def heed_tile(x: jax.Array, role: str, options: Heed, query: jax.Array | None) -> Tile:
    """Encodes x [..., C, D] for query [..., n, D]; see `kvjax.ops.encode_tile.api.heed_tile`."""
    rows = as_rows(hadamard.rotate(x), role)
    if role == "value" and options.feedback and options.coupling:
        codes, affine = values_in_turn(rows, options)
    elif role == "key" and options.feedback and query is not None:
        power = score_power(rows, hadamard.rotate(query), options)
        codes, affine = keys_in_turn(rows, power, options)
    else:
        codes, affine = fit_row(rows, options)
    return {"codes": packing.pack(codes, options.bits), "affine": affine}


def fit_row(row: jax.Array, options: Heed) -> Fitted:
    """Rows [..., M] in the codes of the best of five clipped ranges, under the scale and zero that
    fit those codes best, as stored."""
    low, high = row.min(axis=-1, keepdims=True), row.max(axis=-1, keepdims=True)
    middle, half = (low + high) / 2, (high - low) / 2
    found = []
    for clip in options.clips:
        step = jnp.maximum(2 * half * clip / (2**options.bits - 1), 1e-10)
        fitted = round_and_fit(row, step, middle - half * clip, options)
        found.append((((row - decoded(*fitted, options)) ** 2).sum(axis=-1), *fitted))
    error, codes, affine = found[0]
    for e, c, a in found[1:]:
        better = e < error
        error = jnp.where(better, e, error)
        codes, affine = jnp.where(better[..., None], c, codes), jnp.where(better, a, affine)
    return codes, affine


def round_and_fit(row: jax.Array, scale: jax.Array, zero: jax.Array, options: Heed) -> Fitted:
    """Rows [..., M] rounded under scale and zero [..., 1], and these refitted to the codes by least
    squares. Row and codes are taken about their means."""
    codes = jnp.clip(jnp.round((row - zero) * (1 / scale)), 0, 2**options.bits - 1)
    mean, center = codes.mean(axis=-1, keepdims=True), row.mean(axis=-1, keepdims=True)
    apart = codes - mean
    power = (apart * apart).sum(axis=-1, keepdims=True)
    slope = (apart * (row - center)).sum(axis=-1, keepdims=True) / jnp.maximum(power, 1e-10)
    # One code for all numbers: they are one number, or so nearly that the scale has no meaning.
    scale = jnp.where(power > 0, slope, scale)
    affine = packing.pack_pair(scale[..., 0], (center - scale * mean)[..., 0], options.meta_dtype)
    return codes.astype(jnp.int32), affine


def decoded(codes: jax.Array, affine: jax.Array, options: Heed) -> jax.Array:
    """What codes [..., M] under affine [...] stand for, float32 [..., M]."""
    scale, zero = packing.unpack_pair(affine, options.meta_dtype)
    return codes * scale[..., None] + zero[..., None]


def score_power(rows: jax.Array, query: jax.Array, options: Heed) -> jax.Array:
    """C float32 [..., D, D] of key channels [..., D, C] and query [..., n, D]: the queries' second
    moment and the keys' covariance at a mean diagonal of 1 each, mixed and damped."""
    keys = rows - rows.mean(axis=-1, keepdims=True)
    share = options.own_share
    mixed = (1 - share) * _moment(query) + share * _moment(keys.swapaxes(-1, -2))
    return mixed + DAMPING * jnp.eye(rows.shape[-2])


def _moment(x: jax.Array) -> jax.Array:
    """Σ x xᵀ of x [..., n, D] at a mean diagonal of 1; zeros where x is zero."""
    power = jnp.einsum("...nd,...ne->...de", x, x, precision=lax.Precision.HIGHEST)
    mean = jnp.trace(power, axis1=-2, axis2=-1)[..., None, None] / power.shape[-1]
    return power / jnp.maximum(mean, 1e-30)


def order_and_factor(power: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Channels by falling C_ii, int32 [..., D]; C [..., D, D] in that order; and the unit upper
    triangular F of C = F diag Fᵀ."""
    order = jnp.argsort(-jnp.diagonal(power, axis1=-2, axis2=-1), axis=-1)
    power = jnp.take_along_axis(power, order[..., None], axis=-2)
    power = jnp.take_along_axis(power, order[..., None, :], axis=-1)
    # Cholesky's factor is lower triangular; of the matrix turned round, it is the upper one.
    upper = jnp.linalg.cholesky(power[..., ::-1, ::-1])[..., ::-1, ::-1]
    return order, power, upper / jnp.diagonal(upper, axis1=-2, axis2=-1)[..., None, :]


def keys_in_turn(rows: jax.Array, power: jax.Array, options: Heed) -> Fitted:
    """Codes [..., D, C] and affine [..., D] of key channels [..., D, C]: one pass with feedback,
    then sweeps in which each channel is refitted to what all the others have left."""
    order, power, factor = order_and_factor(power)
    rows = jnp.take_along_axis(rows, order[..., None], axis=-2)
    channels = rows.shape[-2]
    # What channel i wants of the others' errors e: F_ji e_j before it, then C_ij e_j / C_ii.
    pull = power / jnp.diagonal(power, axis1=-2, axis2=-1)[..., None]
    pull = jnp.where(jnp.eye(channels, dtype=bool), 0, pull)
    first = factor.swapaxes(-1, -2)

    def one(t: jax.Array, state: tuple, weights: jax.Array, again: bool) -> tuple:
        i, (errors, codes, affine) = t % channels, state
        weight = lax.dynamic_index_in_dim(weights, i, -2, keepdims=False)
        row = lax.dynamic_index_in_dim(rows, i, -2, keepdims=False)
        target = row + (weight[..., None] * errors).sum(axis=-2)
        if again:
            meta = lax.dynamic_index_in_dim(affine, i, -1, keepdims=False)
            code, meta = refit_row(target, meta, options)
        else:  # the errors of channels still to come, and of this one, are 0
            code, meta = fit_row(target, options)
        error = row - decoded(code, meta, options)
        return (
            lax.dynamic_update_index_in_dim(errors, error, i, errors.ndim - 2),
            lax.dynamic_update_index_in_dim(codes, code, i, codes.ndim - 2),
            lax.dynamic_update_index_in_dim(affine, meta, i, affine.ndim - 1),
        )

    state = (jnp.zeros_like(rows), jnp.zeros(rows.shape, jnp.int32),
             jnp.zeros(rows.shape[:-1], jnp.int32))  # fmt: skip
    state = lax.fori_loop(0, channels, lambda t, s: one(t, s, first, False), state)
    turns = options.sweeps * channels
    _, codes, affine = lax.fori_loop(0, turns, lambda t, s: one(t, s, pull, True), state)
    back = jnp.argsort(order, axis=-1)
    return (
        jnp.take_along_axis(codes, back[..., None], axis=-2),
        jnp.take_along_axis(affine, back, axis=-1),
    )


def refit_row(row: jax.Array, affine: jax.Array, options: Heed) -> Fitted:
    """Rows [..., M] rounded under the affine [...] that they have, and that refitted."""
    scale, zero = packing.unpack_pair(affine, options.meta_dtype)
    scale = jnp.where(jnp.abs(scale) > 1e-10, scale, 1e-10)
    return round_and_fit(row, scale[..., None], zero[..., None], options)


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
