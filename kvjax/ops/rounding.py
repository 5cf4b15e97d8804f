"""Rounding the rows of a tile to a few levels: what encoders and their kernels share."""

import jax
import jax.numpy as jnp
from jax import lax


def as_rows(x: jax.Array, role: str) -> jax.Array:
    """[..., C, D] as rows that share a scale: keys [..., D, C], values unchanged. Own inverse."""
    return x.swapaxes(-1, -2) if role == "key" else x


def divide(x: jax.Array, by: jax.Array) -> jax.Array:
    """x / by, correctly rounded, where ``by`` broadcasts to the shape of x.

    XLA turns division by a broadcast into multiplication by its reciprocal. The last bit matters
    here: 16-bit data often lie half way between two codes and would fall on the other side.
    """
    return x / lax.optimization_barrier(jnp.broadcast_to(by, x.shape))


def quantize_rows(rows: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Asymmetric rounding of each row of float32 [..., R, M].

    Returns int32 codes [..., R, M], and float32 scale and zero [..., R, 1], with
    ``rows ~ codes * scale + zero``. A row without range gets codes 0 and decodes to its value.
    """
    levels = jnp.float32(2**bits - 1)
    zero = rows.min(axis=-1, keepdims=True)
    scale = jnp.maximum(divide(rows.max(axis=-1, keepdims=True) - zero, levels), 1e-10)
    codes = jnp.clip(jnp.round(divide(rows - zero, scale)), 0, levels)
    return codes.astype(jnp.int32), scale, zero
