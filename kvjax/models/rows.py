"""Rows of different length: checks of what a caller gives, and the move to the left."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache.segments import ModelCache
from kvjax.models.config import DecoderConfig


class Aligned(NamedTuple):
    """A padded batch moved to the left: tokens [B,T] (or inputs [B,T,E]), length [B], and the way
    back [B,T]."""

    tokens: Array
    length: Array
    back: Array | None


def align(tokens: Array, mask: Array | None) -> Aligned:
    """Moves each row's real tokens to the front; mask [B,T] bool or None where all are real."""
    batch, width = tokens.shape[:2]
    if mask is None:
        return Aligned(tokens, jnp.full(batch, width, jnp.int32), None)
    order = jnp.argsort(~mask, axis=1, stable=True)
    count = mask.sum(1).astype(jnp.int32)
    back = jnp.where(mask, jnp.argsort(order, axis=1), -1)
    wide = order.reshape(*order.shape, *[1] * (tokens.ndim - 2))
    return Aligned(jnp.take_along_axis(tokens, wide, 1), count, back)


def restore(x: Array, back: Array | None) -> Array:
    """Undoes `align` on [B,T,...]; padded places get 0."""
    if back is None:
        return x
    wide = back.reshape(*back.shape, *[1] * (x.ndim - 2))
    return jnp.where(wide >= 0, jnp.take_along_axis(x, jnp.maximum(wide, 0), 1), 0)


def checked_tokens(
    config: DecoderConfig, tokens: Array, mask: Array | None
) -> tuple[Array, Array | None]:
    """tokens as int32 [B,T] and mask as bool [B,T]; ValueError where they are not.

    Instead of tokens: inputs [B,T,E] of a floating dtype, what the first layer is to see.
    """
    if isinstance(tokens, jax.core.Tracer):
        return tokens, mask
    if np.ndim(tokens) == 3:
        return _checked_inputs(config, jnp.asarray(tokens), mask)
    host = np.asarray(tokens)
    if host.ndim != 2 or 0 in host.shape:
        raise ValueError(f"tokens has shape {host.shape}; give [B,T] with at least one token")
    if not np.issubdtype(host.dtype, np.integer):
        raise ValueError(f"tokens has dtype {host.dtype}; give integers")
    real = _checked_mask(mask, host.shape)
    seen = host if real is None else host[real]
    if seen.size and (seen.min() < 0 or seen.max() >= config.vocab_size):
        raise ValueError(f"tokens holds {seen.min()} … {seen.max()}; ids are 0 … "
                         f"{config.vocab_size - 1}")  # fmt: skip
    host = np.clip(host, 0, config.vocab_size - 1)
    return jnp.asarray(host, jnp.int32), None if real is None else jnp.asarray(real)


def _checked_mask(mask: Array | None, shape: tuple[int, ...]) -> np.ndarray | None:
    real = None if mask is None else np.asarray(mask).astype(bool)
    if real is not None and real.shape != shape:
        raise ValueError(f"mask has shape {real.shape} and tokens {shape}; they must agree")
    return real


def _checked_inputs(
    config: DecoderConfig, inputs: Array, mask: Array | None
) -> tuple[Array, Array | None]:
    if not jnp.issubdtype(inputs.dtype, jnp.floating):
        raise ValueError(f"inputs has dtype {inputs.dtype}; give [B,T,E] floats, or tokens [B,T]")
    if 0 in inputs.shape or inputs.shape[2] != config.hidden_size:
        raise ValueError(f"inputs has shape {inputs.shape}; give [B,T,{config.hidden_size}] with at"
                         " least one token")  # fmt: skip
    real = _checked_mask(mask, inputs.shape[:2])
    return inputs, None if real is None else jnp.asarray(real)


def check_room(cache: ModelCache, tokens: Array, mask: Array | None) -> None:
    """ValueError where a row would outgrow the capacity, or the batch is another."""
    if cache.length.shape[0] != tokens.shape[0]:
        raise ValueError(f"tokens has {tokens.shape[0]} rows and the cache "
                         f"{cache.length.shape[0]}; they must agree")  # fmt: skip
    if isinstance(tokens, jax.core.Tracer) or isinstance(cache.length, jax.core.Tracer):
        return  # inside jit the caller has checked; entries beyond the capacity are dropped
    count = tokens.shape[1] if mask is None else np.asarray(mask).sum(1)
    longest = int((np.asarray(cache.length) + count).max())
    if longest > cache.capacity:
        raise ValueError(f"a row would hold {longest} tokens but the cache's capacity is "
                         f"{cache.capacity}; give init_cache a larger capacity")  # fmt: skip
