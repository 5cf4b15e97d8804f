"""The definition: plain attention over exact entries, read in one go."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kvjax.ops.partials import Block, Partial, Scoring, read


def attention(
    query: Array, key: Array, value: Array, length: Array, bias: Array | None, *, scoring: Scoring
) -> Partial:
    """See `dense_decode_attention`."""
    slot = jnp.arange(key.shape[2], dtype=jnp.int32)
    position = jnp.broadcast_to(slot, (query.shape[0], key.shape[2]))
    block = Block(key, value, position, slot < length[:, None], bias)
    return read(query, jnp.zeros(query.shape[:2], jnp.int32), lambda _: block, 1, scoring)
