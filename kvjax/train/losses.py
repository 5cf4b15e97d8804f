"""Cross-entropy over a large vocabulary without ever holding all logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.models.decoder import Decoder
from kvjax.soft.layout import IGNORE
from kvjax.soft.model import cross_entropy


def chunked_cross_entropy(
    hidden: Array, weight: Array, wanted: Array, chunk: int, softcap: float | None = None
) -> tuple[Array, Array]:
    """Σ −log p(wanted) and how many positions count, `chunk` positions of each row at a time.

    Forward and backward hold logits [B,chunk,V] alone: each chunk is computed again in the
    backward pass. The gradient of the head is summed over chunks in float32.

    Args:
      hidden: [B,T,E], states after the last norm.
      weight: [V,E], the head.
      wanted: [B,T] int32, −100 where a position does not count.
      chunk: positions at a time; T need not be a multiple.
      softcap: logits become softcap · tanh(logits / softcap); None: as they are.

    Raises:
      ValueError: for a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; use 1 or more positions")
    batch, tokens, width = hidden.shape
    fill = -tokens % chunk
    hidden = jnp.pad(hidden, ((0, 0), (0, fill), (0, 0)))
    wanted = jnp.pad(wanted, ((0, 0), (0, fill)), constant_values=IGNORE)
    pieces = (
        hidden.reshape(batch, -1, chunk, width).swapaxes(0, 1),
        wanted.reshape(batch, -1, chunk).swapaxes(0, 1),
    )
    wide, narrow = weight.astype(jnp.float32), hidden.dtype

    @jax.checkpoint
    def one(sums: tuple[Array, Array], piece: tuple[Array, Array]) -> tuple:
        states, labels = piece
        scores = jnp.einsum(
            "bte,ve->btv", states, wide.astype(narrow), preferred_element_type=jnp.float32
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        total, count = cross_entropy(scores, labels)
        return (sums[0] + total, sums[1] + count), None

    start = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))
    return jax.lax.scan(one, start, pieces)[0]


def next_token_loss(
    model: Decoder, hidden: Array, wanted: Array, chunk: int
) -> tuple[Array, Array]:
    """`chunked_cross_entropy` under a decoder's own head."""
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    return chunked_cross_entropy(hidden, head.weight[...], wanted, chunk,
                                 model.config.final_softcap)  # fmt: skip
