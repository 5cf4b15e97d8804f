"""The cache's arrays, and the two ways in which tokens enter them: exact slots and whole tiles.

Shapes: exact segments hold each stream as [B,K,S,D]; the body holds each leaf of an encoded tile
with the tile axis third, [B,K,N,...]. Rows of a batch may have different lengths; every write is
placed per row and drops what does not belong, so nothing is ever clamped onto a valid entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache.layout import Layout, Plan
from kvjax.cache.spec import LayerSpec

Exact = Mapping[str, Array]
Tiles = Mapping[str, Mapping[str, Array]]


class Chunk(NamedTuple):
    """T new tokens of one layer, left-aligned: row b's real tokens are the first `length[b]`.

    Attributes:
      entries: stream name -> [B,K,T,D], as attention reads them (keys after RoPE).
      start: [B] int32, how many tokens of each row came before.
      length: [B] int32, how many of the T tokens are real.
      query: [B,T,H,D] after RoPE.
      key_pre: [B,T,K,D], keys before RoPE.
      hidden: [B,T,E], the layer's input after its norm.
      inverse_frequencies: [D_rot/2] float32, the layer's RoPE; None for a layer without.
    """

    entries: Exact
    start: Array
    length: Array
    query: Array
    key_pre: Array | None = None
    hidden: Array | None = None
    inverse_frequencies: Array | None = None

    @property
    def positions(self) -> Array:
        """[B,T] int32."""
        tokens = self.query.shape[1]
        return self.start[:, None] + jnp.arange(tokens, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's entries. `spec` and `plan` are static, the rest are arrays.

    Attributes:
      sink: stream -> [B,K,S,D].
      body: stream -> leaf -> [B,K,N,...], encoded tiles.
      recent: stream -> [B,K,R,D].
      kept: what a selection left after `finish`; None before, and for selections by position.
    """

    sink: Exact
    body: Tiles
    recent: Exact
    kept: Any
    spec: LayerSpec = field(metadata={"static": True})
    plan: Plan = field(metadata={"static": True})
    layout: Layout = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelCache:
    """A model's cache: a pytree that is never changed in place.

    Attributes:
      layers: one `LayerCache` a layer.
      shared: what is not one layer's, by name.
      length: [B] int32, tokens of each row so far.
      capacity: the most tokens a row may hold.
      transform: the functions that read and fill it.
    """

    layers: tuple[LayerCache, ...]
    shared: dict[str, Any]
    length: Array
    capacity: int = field(metadata={"static": True})
    transform: Any = field(metadata={"static": True})


def write_run(buffer: Array, run: Array, slot: Array, lo: Array, hi: Array) -> Array:
    """Writes tokens lo ≤ t < hi of `run` [B,K,T,D] into slots slot + t of `buffer` [B,K,R,D].

    slot, lo, hi: [B] int32. Slots outside the buffer are dropped. A run shorter than the buffer
    rewrites only its own T slots.
    """
    size, tokens = buffer.shape[2], run.shape[2]
    if size == 0:
        return buffer
    width = min(size, tokens)
    base = jnp.clip(slot, 0, size - width)
    old = jax.vmap(lambda x, s: lax.dynamic_slice_in_dim(x, s, width, 1))(buffer, base)
    source = base[:, None] + jnp.arange(width) - slot[:, None]
    valid = (source >= lo[:, None]) & (source < hi[:, None])
    new = _merge_run(old, run, source, valid)
    return jax.vmap(lambda x, u, s: lax.dynamic_update_slice_in_dim(x, u, s, 1))(buffer, new, base)


def write_ring(buffer: Array, run: Array, start: Array, count: Array) -> Array:
    """Writes a chunk into a ring: token number i goes to slot i mod R, the newest R survive.

    start: [B], the number of the chunk's first token; tokens with a negative number are dropped.
    """
    size, tokens = buffer.shape[2], run.shape[2]
    if tokens == 1:
        return write_run(buffer, run, start % size, jnp.where(start < 0, 1, 0), count)
    last = start + count - 1
    number = last[:, None] - (last[:, None] - jnp.arange(size)) % size
    source = number - start[:, None]
    valid = (number >= 0) & (source >= 0) & (count > 0)[:, None]
    return _merge_run(buffer, run, source, valid)


def _merge_run(old: Array, run: Array, source: Array, valid: Array) -> Array:
    """Slot j takes token source[b, j] of `run` where valid[b, j], else keeps `old`."""
    index = jnp.clip(source, 0, run.shape[2] - 1)[:, None, :, None]
    taken = run if run.shape[2] == 1 else jnp.take_along_axis(run, index, 2)
    return jnp.where(valid[:, None, :, None], taken.astype(old.dtype), old)


def write_tile(body: Array, tile: Array, slot: Array, full: Array) -> Array:
    """Writes `tile` [B,K,...] into slot [B] of `body` [B,K,N,...] for the rows where `full` [B]."""

    def one(body: Array, tile: Array, slot: Array, full: Array) -> Array:
        tile = tile[:, None].astype(body.dtype)
        old = lax.dynamic_slice_in_dim(body, slot, 1, 1)
        return lax.dynamic_update_slice_in_dim(body, jnp.where(full, tile, old), slot, 1)

    return jax.vmap(one)(body, tile, slot, full)
