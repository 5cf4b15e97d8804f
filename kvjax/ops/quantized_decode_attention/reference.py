"""The definition: encoded tiles decoded a few at a time, so that no dequantized copy of a whole
cache ever exists. This is what CPUs run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.ops.partials import DECODE, Block, Partial, Scoring, Visible, block_slots, read

BLOCK = 256  # encoded tokens decoded at a time by a long chunk: its scores and values stay small
DECODE_BLOCK = 2048  # the same for a decoding step


class Late(NamedTuple):
    """Values of encoded tokens that are read exact: `value` [B,K,C,Dv], in the stored frame, stands
    for the tokens of the newest tile from number `since` [B] on (tile 0's first token is 0)."""

    value: Array
    since: Array


def attend_tiles(
    query: Array,
    positions: Array,
    body: Any,
    made: Array,
    decode: Callable[[Any], tuple[Array, Array]],
    *,
    tile: int,
    scoring: Scoring,
    first: int = 0,
    window: int | None = None,
    bias: Array | None = None,
    by_channel: bool = False,
    late: Late | None = None,
) -> Partial:
    """Attention of T queries over tiles that all come before them.

    Args:
      query: [B,T,H,Dk], in the frame in which tiles are stored.
      positions: [B,T] int32, the queries' positions; read only where there is a window.
      body: pytree of leaves [B,K,N,...]; tile number m lies in slot m mod N.
      made: [B] int32, tiles made so far.
      decode: a cut of `body`, n tiles wide -> key [B,K,n,C,Dk], value [B,K,n,C,Dv].
      tile: C, tokens of a tile.
      scoring: scale and softcap.
      first: the position of tile 0's first token.
      window: a query sees the newest `window` tokens, itself included; None: all.
      bias: [B,1|T,N·C] float32, added to the scores; −inf hides an entry.
      by_channel: whether keys are stored channels first, so that reading them as [Dk,C] undoes
        the transpose at the end of `decode`. Speed alone depends on it.
      late: exact values that take the place of decoded ones; None: all are as decoded.
    """
    tiles = jax.tree.leaves(body)[0].shape[2]
    decoding = query.shape[1] <= DECODE
    width = min(tiles, max(1, (DECODE_BLOCK if decoding else BLOCK) // tile))
    made = made[:, None]
    within = jnp.arange(tile, dtype=jnp.int32)

    def load(i: Array | int) -> Block:
        slot, fresh = block_slots(i, width, tiles)
        number = made - 1 - (made - 1 - slot) % tiles  # the tile that a slot holds now
        token = (number[..., None] * tile + within).reshape(made.shape[0], -1)
        real = (number >= 0) & fresh  # [B,width]
        key, value = decode(_cut(body, slot[0], width, by_channel))
        if decoding and by_channel:
            key = key.swapaxes(3, 4)
        else:
            key = key.reshape(*key.shape[:2], -1, key.shape[-1])
        if late is not None:
            exact = token.reshape(-1, 1, width, tile, 1) >= late.since[:, None, None, None, None]
            value = jnp.where(exact, late.value[:, :, None], value)
        value = jnp.where(real[:, None, :, None, None], value, 0)
        value = value.reshape(*value.shape[:2], -1, value.shape[-1])
        valid = jnp.repeat(real, tile, axis=1)
        part = None
        if bias is not None:
            part = lax.dynamic_slice_in_dim(bias, slot[0] * tile, width * tile, 2)
        return Block(key, value, first + token, valid, part, clean=True)

    # A loop even over one block: outside of one, XLA fuses the decoder into its readers and runs
    # it again and again, five times slower.
    count = -(-jnp.max(jnp.minimum(made, tiles)) // width)
    return read(query, positions, load, count, scoring, Visible(window=window))


def _cut(body: Any, first: Array, width: int, by_channel: bool) -> Any:
    """Tiles first … first + width of every leaf."""
    cut = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, width, 2), body)
    # Packed words are few bytes, and loops that unpack are several times faster over whole arrays
    # than over cuts.
    return lax.optimization_barrier(cut) if by_channel else cut
