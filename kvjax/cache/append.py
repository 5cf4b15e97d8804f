"""`append` and `flush`: the only places where tokens enter a cache.

A chunk fills the sinks first, then `recent`. With an encoder, every tile of C tokens that is
complete leaves `recent` for the body, encoded once and never again. The tile boundaries depend on
token numbers alone, so any chunking of the same keys and values leaves the same bits.

A chunk of several tokens brings its tiles over within `append`. A single token can only fill a
tile, and then it does so in every layer at once: `flush` encodes them all in one loop over the
layers, under one branch, so that a decoding step compiles one encoder and mostly runs none.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache.attend import after
from kvjax.cache.layout import Layout, Plan
from kvjax.cache.segments import Chunk, Exact, LayerCache, Tiles, write_ring, write_run, write_tile

QUERY = "query"  # the name in `recent` of queries that an encoder wants to see
QUERY_DTYPE = jnp.bfloat16  # only their second moment is asked for


def append(layer: LayerCache, chunk: Chunk, lse: Array | None = None) -> LayerCache:
    """The layer with the chunk's real tokens added; after a chunk of one token, call `flush`.

    Args:
      layer: the layer as `attend` read it.
      chunk: T new tokens.
      lse: [B,T,H] float32 of the step, for selections that score by attention.
    """
    if lse is not None:
        chunk = chunk._replace(start=after(lse, chunk.start))
    here = layer.layout
    if QUERY in layer.recent:
        entries = {**chunk.entries, QUERY: chunk.query.swapaxes(1, 2)}
        chunk = chunk._replace(entries=entries)
    sink = {
        name: write_run(
            old, chunk.entries[name], chunk.start, jnp.zeros_like(chunk.start), chunk.length
        )
        for name, old in layer.sink.items()
    }
    if here.tile:
        body, recent = _append_tiles(layer, chunk)
    else:
        body, recent = layer.body, _append_exact(layer, chunk)
    return dataclasses.replace(layer, sink=sink, body=body, recent=recent)


def _append_exact(layer: LayerCache, chunk: Chunk) -> Exact:
    first = chunk.start - layer.layout.sink  # negative while the sinks fill
    if layer.layout.ring:
        return {
            n: write_ring(old, chunk.entries[n], first, chunk.length)
            for n, old in layer.recent.items()
        }
    lo = jnp.zeros_like(first)
    return {
        n: write_run(old, chunk.entries[n], first, lo, chunk.length)
        for n, old in layer.recent.items()
    }


def _append_tiles(layer: LayerCache, chunk: Chunk) -> tuple[Tiles, Exact]:
    here, tokens = layer.layout, chunk.query.shape[1]
    before = jnp.maximum(chunk.start - here.sink, 0)
    now = jnp.maximum(chunk.start + chunk.length - here.sink, 0)
    flushes = (here.tile - 1 + tokens) // here.tile if here.tiles and tokens > 1 else 0
    desk = _desk(layer, chunk, before, flushes)
    if tokens == 1:
        return layer.body, desk
    first, last = before // here.tile, now // here.tile

    def bring(m: Array | int, body: Tiles) -> Tiles:
        full = first + m < last
        new = _encode(layer, {n: _tile_at(d, m, here.tile) for n, d in desk.items()}, full)
        slot = (first + m) % here.tiles
        return {
            name: {leaf: write_tile(old, new[name][leaf], slot, full) for leaf, old in x.items()}
            for name, x in body.items()
        }

    body: Tiles = layer.body
    if flushes == 1:
        body = bring(0, body)
    elif flushes > 1:
        body = lax.fori_loop(0, flushes, bring, body)
    kept = _left_over(desk, last - first, here.recent)
    if layer.plan.encode is not None and layer.plan.encode.keeps_values:
        before_it = _left_over(desk, jnp.maximum(last - first - 1, 0), here.recent)
        fresh = (jnp.arange(here.recent) < (now % here.tile)[:, None])[:, None, :, None]
        kept = {n: jnp.where(fresh, x, before_it[n]) for n, x in kept.items()}
    return body, kept


def _desk(layer: LayerCache, chunk: Chunk, before: Array, flushes: int) -> Exact:
    """`recent` followed by the chunk, [B,K,R',D]: the tokens that tiles are cut from."""
    here, tokens = layer.layout, chunk.query.shape[1]
    skip = jnp.clip(here.sink - chunk.start, 0, tokens)  # tokens that went to the sinks
    slot = before % here.tile - skip
    size = here.recent if tokens == 1 else (flushes + 1) * here.tile
    desk = {}
    for name, old in layer.recent.items():
        room = jnp.zeros((*old.shape[:2], size - old.shape[2], old.shape[3]), old.dtype)
        whole = jnp.concatenate([old, room], 2) if room.shape[2] else old
        desk[name] = write_run(whole, chunk.entries[name], slot, skip, chunk.length)
    return desk


def _tile_at(desk: Array, m: Array | int, tile: int) -> Array:
    return lax.dynamic_slice_in_dim(desk, m * tile, tile, 2)


def _encode(layer: LayerCache, entries: Exact, full: Array) -> Tiles:
    """One encoded tile of every row, under one branch for the batch."""
    shapes = jax.eval_shape(_encode_rows, layer, entries, full)

    def nothing(layer: LayerCache, entries: Exact, full: Array) -> Tiles:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    return lax.cond(jnp.any(full), _encode_rows, nothing, layer, entries, full)


def _encode_rows(layer: LayerCache, entries: Exact, full: Array) -> Tiles:
    encoder = layer.plan.encode
    assert encoder is not None
    # Rows without a full tile hold unwritten slots here; they must not meet the arithmetic.
    clean = {n: jnp.where(full[:, None, None, None], x, 0) for n, x in entries.items()}
    query = clean.get(QUERY)
    if query is not None:
        batch, _, _, dim = query.shape
        query = query.reshape(batch, layer.spec.kv_heads, -1, dim)
    tiles, at = {}, 0
    for stream in layer.spec.streams:
        meets = None
        if query is not None and stream.is_key:
            meets, at = query[..., at : at + stream.dim], at + stream.dim
        tiles[stream.name] = encoder.encode_tile_for(clean[stream.name], stream.encode_role, meets)
    return tiles


def keeps_queries(plan: Plan, here: Layout) -> bool:
    """Whether `recent` holds its tokens' queries too, [B,H,R,D] by the name `QUERY`."""
    return here.tiles > 0 and plan.encode is not None and plan.encode.reads_queries


def _left_over(desk: Exact, flushed: Array, size: int) -> Exact:
    """The tokens after the last whole tile of each row."""

    def one(x: Array, tiles: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, tiles * size, size, 1)

    return {name: jax.vmap(one)(x, flushed) for name, x in desk.items()}


def flush(layers: tuple[LayerCache, ...], start: Array, length: Array) -> tuple[LayerCache, ...]:
    """Encodes the tiles that a step of one token has filled, in all layers.

    Args:
      layers: all layers of a model, after `append`.
      start: [B] int32, each row's tokens before the step.
      length: [B] int32, 1 where the row's token is real, else 0.
    """
    found = list(layers)
    for group in _alike(layers):
        for index, layer in zip(group, _flush_alike([layers[i] for i in group], start, length),
                                strict=True):  # fmt: skip
            found[index] = layer
    return tuple(found)


def _alike(layers: tuple[LayerCache, ...]) -> list[list[int]]:
    """The layers that hold tiles, those of one kind and shape together."""
    groups: dict[tuple, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.layout.tiles:
            groups.setdefault((layer.spec, layer.plan, layer.layout), []).append(index)
    return list(groups.values())


def _flush_alike(layers: list[LayerCache], start: Array, length: Array) -> list[LayerCache]:
    one, here = layers[0], layers[0].layout
    held = jnp.maximum(start + length - here.sink, 0)
    full = (held % here.tile == 0) & (held > 0) & (length > 0)
    slot = (held // here.tile - 1) % here.tiles
    recent = [layer.recent for layer in layers]

    def encode(recent: list[Exact], bodies: list[Tiles]) -> list[Tiles]:
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *recent)
        tiles = lax.map(lambda entries: _encode_rows(one, entries, full), stacked)
        return [
            jax.tree.map(lambda old, new, i=i: write_tile(old, new[i], slot, full), body, tiles)
            for i, body in enumerate(bodies)
        ]

    def nothing(recent: list[Exact], bodies: list[Tiles]) -> list[Tiles]:
        return bodies

    bodies = lax.cond(jnp.any(full), encode, nothing, recent, [layer.body for layer in layers])
    return [dataclasses.replace(x, body=body) for x, body in zip(layers, bodies, strict=True)]
