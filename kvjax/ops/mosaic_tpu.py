"""What the TPU attention kernels share."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def bias_rows(bias: Array, rows: int, tokens: int) -> Array:
    """A bias [1|T,S] for the query rows of one KV head, [1|rows,S]: they go through the T new
    tokens in turn. Selects, for a gather of rows does not lower."""
    if bias.shape[0] == 1:
        return bias
    token = lax.broadcasted_iota(jnp.int32, (rows, bias.shape[1]), 0) % tokens
    found = jnp.broadcast_to(bias[:1], token.shape)
    for t in range(1, tokens):
        found = jnp.where(token == t, bias[t : t + 1], found)
    return found
