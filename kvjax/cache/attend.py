"""`attend`: a chunk's queries read the cache as it stood before the chunk, and the chunk itself.

Each segment is one partial; `merge` joins them. The chunk's own keys and values are read exact
and causal, only later chunks read them as they were stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache.segments import Chunk, Exact, LayerCache, Tiles
from kvjax.cache.spec import LayerSpec, StreamSpec
from kvjax.encode.base import Encoder
from kvjax.ops.dense_decode_attention.api import dense_decode_attention
from kvjax.ops.dispatch import BACKENDS
from kvjax.ops.partials import DECODE, Block, Partial, Scoring, Visible, block_slots, merge, read
from kvjax.ops.quantized_decode_attention.api import quantized_decode_attention
from kvjax.ops.quantized_decode_attention.reference import Late, attend_tiles

BLOCK = 256  # entries read at a time: their scores and masked values stay small
QUERY_RUNS = 8  # at most so many runs of a chunk's queries, each with its own causal end


def attend(layer: LayerCache, query: Array, chunk: Chunk) -> Partial:
    """The chunk's attention output.

    Args:
      layer: the layer before the chunk.
      query: [B,T,H,D], after RoPE.
      chunk: the chunk that `query` belongs to.

    Returns:
      out [B,T,H,Dv] float32 and lse [B,T,H] float32. Rows beyond `chunk.length` hold no meaning.
    """
    here = layer.layout
    kept = 0 if layer.plan.select.rerotate else here.sink
    own = Visible(causal=True, window=here.window, sink=kept)
    result = own_partial(layer.spec, query, chunk, own)
    if layer.plan.select.rerotate and here.window is not None:
        far = Visible(causal=True, window=here.window, sink=here.sink, beyond=True)
        result = merge(
            result, own_partial(layer.spec, _near_sinks(layer, query, chunk), chunk, far)
        )
    if layer.recent and here.recent:
        result = merge(result, _recent_partial(layer, query, chunk))
    if layer.body and here.tiles:
        result = merge(result, _body_partial(layer, query, chunk))
    if layer.sink and here.sink:
        result = merge(result, _sink_partial(layer, query, chunk))
    return result._replace(lse=after(result.out, result.lse))


def after(first: Array, second: Array) -> Array:
    """`second`, made to depend on `first`.

    Attention reads the old cache and `append` writes the new one in its place, but nothing orders
    the two, and where XLA sees no order it copies the whole cache, twice a step on CPU (an
    optimization barrier does not help: it is gone before copies are placed). So lse waits for
    out, and what is written waits for lse. No output is ever this large: nothing is added.
    """
    never = jnp.where(jnp.min(first) > jnp.finfo(jnp.float32).max, 1, 0)
    return second + never.astype(second.dtype)


def own_partial(
    spec: LayerSpec,
    query: Array,
    chunk: Chunk,
    visible: Visible,
    checkpoint: bool = False,
    segments: Array | None = None,
) -> Partial:
    """The chunk over itself, exact. The only partial of a model without a cache.

    `segments` [B,T] int32: a token reads only tokens of its own segment (packed documents).
    """
    tokens = query.shape[1]
    width = min(tokens, BLOCK)

    def load(part: slice, i: Array | int) -> Block:
        index, fresh = block_slots(i, width, tokens)
        valid = (index < chunk.length[:, None]) & fresh
        block = _block(spec, chunk.entries, index, chunk.start[:, None] + index, valid)
        if segments is None:
            return block
        here = lax.dynamic_slice_in_dim(segments, index[0], width, 1)
        same = segments[:, part, None] == here[:, None, :]
        return block._replace(bias=jnp.where(same, 0.0, -jnp.inf))

    def answer(part: slice, query: Array, positions: Array) -> Partial:
        blocks = -(-(part.stop if visible.causal else tokens) // width)
        own = functools.partial(load, part)
        return read(query, positions, own, blocks, spec.scoring, visible, checkpoint)

    # A run of queries reads only the blocks up to its own end: nearly half of them. Where it is
    # recomputed, only one run's sums after each block are there at a time in the backward pass.
    run, parts = max(width, -(-tokens // QUERY_RUNS)), []
    for at in range(0, tokens, run):
        part = slice(at, min(at + run, tokens))
        reads = functools.partial(answer, part)
        rows = query[:, part], chunk.positions[:, part]
        parts.append((jax.checkpoint(reads) if checkpoint else reads)(*rows))
    return Partial(*(_join(x, 1) for x in zip(*parts, strict=True)))


def _width(size: int, chunk: Chunk) -> int:
    """Slots of a block: all of them where the scores are small, for cutting a block copies it."""
    return size if chunk.query.shape[1] <= DECODE else min(size, BLOCK)


def _block(spec: LayerSpec, stored: Exact, index: Array, position: Array, valid: Array) -> Block:
    width = index.shape[0]

    def cut(stream: StreamSpec) -> Array:
        whole = stored[stream.name]
        if width == whole.shape[2]:
            return whole
        return lax.dynamic_slice_in_dim(whole, index[0], width, 2)

    key = _join([cut(s) for s in spec.key_streams])
    value = _join([cut(s) for s in spec.value_streams])
    uncut = width == stored[spec.streams[0].name].shape[2] and width > BLOCK
    return Block(key, value, position, valid, stored=uncut)


def _join(parts: Sequence[Array], axis: int = -1) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _recent_partial(layer: LayerCache, query: Array, chunk: Chunk) -> Partial:
    here = layer.layout
    held = jnp.maximum(chunk.start - here.sink, 0)[:, None]  # non-sink tokens so far
    width = _width(here.recent, chunk)

    def load(i: Array | int) -> Block:
        slot, fresh = block_slots(i, width, here.recent)
        if here.ring:
            number = held - 1 - (held - 1 - slot) % here.recent
        elif here.tile:
            number = held - held % here.tile + slot
        else:
            number = jnp.broadcast_to(slot, (held.shape[0], width))
        valid = (number >= 0) & (number < held) & fresh
        return _block(layer.spec, layer.recent, slot, here.sink + number, valid)

    used = held % here.tile if here.tile else jnp.minimum(held, here.recent)
    count = _blocks(used, width, here.recent)
    near = Visible(window=here.window)
    return _read(query, chunk.positions, load, count, layer.spec.scoring, near)


def _blocks(used: Array, width: int, size: int) -> Array | int:
    """How many blocks hold anything in the longest row; a plain 1 when there is just one."""
    return 1 if size <= width else -(-jnp.max(used) // width)


def _read(
    query: Array, positions: Array, load: Callable[[Array | int], Block], count: Array | int,
    scoring: Scoring, visible: Visible,
) -> Partial:  # fmt: skip
    """`read`, by the kernel of the device at hand where a decoding step reads one block; in an
    exact segment what is valid comes first."""
    if isinstance(count, Array) or not _has_kernels() or query.shape[1] > DECODE:
        return read(query, positions, load, count, scoring, visible)
    block, bias = load(0), None
    if visible.window is not None:
        seen = visible(block.position[:, None, :], positions[:, :, None])
        bias = jnp.where(seen, 0.0, -jnp.inf)
    length = jnp.sum(block.valid, 1, dtype=jnp.int32)
    return dense_decode_attention(
        query, block.key, block.value, length, scoring=scoring, bias=bias
    )


def _has_kernels() -> bool:
    """CPUs read in place what a kernel's reference would copy."""
    return jax.default_backend() in BACKENDS


def _sink_partial(layer: LayerCache, query: Array, chunk: Chunk) -> Partial:
    here = layer.layout
    width = _width(here.sink, chunk)
    if layer.plan.select.rerotate:
        query = _near_sinks(layer, query, chunk)

    def load(i: Array | int) -> Block:
        slot, fresh = block_slots(i, width, here.sink)
        held = jnp.minimum(chunk.start, here.sink)[:, None]
        position = jnp.broadcast_to(slot, (held.shape[0], width))
        return _block(layer.spec, layer.sink, slot, position, (slot < held) & fresh)

    used = jnp.minimum(chunk.start, here.sink)
    count = _blocks(used, width, here.sink)
    return _read(query, chunk.positions, load, count, layer.spec.scoring, Visible())


def _near_sinks(layer: LayerCache, query: Array, chunk: Chunk) -> Array:
    """The queries as the sinks see them where kept tokens take consecutive positions: the sinks
    stand right before the window, and no query is further from them than its end."""
    here = layer.layout
    if here.window is None:
        return query
    shift = jnp.minimum(chunk.positions, here.sink + here.window - 1) - chunk.positions
    return rotate_by(query, shift, chunk.inverse_frequencies)


def _body_partial(layer: LayerCache, query: Array, chunk: Chunk) -> Partial:
    """Encoded tiles, read in their stored frame."""
    here, spec, encoder = layer.layout, layer.spec, layer.plan.encode
    assert encoder is not None
    stored = _turned(spec.key_streams, query, encoder.rotate)
    made = jnp.maximum(chunk.start - here.sink, 0) // here.tile  # tiles so far
    format, bodies = encoder.affine(), [dict(layer.body[s.name]) for s in spec.streams]
    late = _late_values(layer, encoder, chunk) if encoder.keeps_values else None
    if format is not None and late is None and query.shape[1] <= DECODE and len(bodies) == 2:
        found = quantized_decode_attention(
            stored, chunk.positions, bodies[0], bodies[1], made, format=format,
            scoring=spec.scoring, first=here.sink, window=here.window,
        )  # fmt: skip
    else:
        found = attend_tiles(
            stored, chunk.positions, layer.body, made, functools.partial(_decode, spec, encoder),
            tile=here.tile, scoring=spec.scoring, first=here.sink, window=here.window,
            by_channel=encoder.key_by_channel, late=late,
        )  # fmt: skip
    return found._replace(out=_turned(spec.value_streams, found.out, encoder.unrotate))


def _late_values(layer: LayerCache, encoder: Encoder, chunk: Chunk) -> Late:
    """The newest C values: of the slots in `recent`, those not yet overwritten hold the end of the
    tile before."""
    here, streams = layer.layout, layer.spec.value_streams
    exact = [encoder.rotate(layer.recent[s.name], s.encode_role) for s in streams]
    return Late(_join(exact), jnp.maximum(chunk.start - here.sink, 0) - here.tile)


def _decode(spec: LayerSpec, encoder: Encoder, tiles: Tiles) -> tuple[Array, Array]:
    """Tiles of all streams as keys [B,K,n,C,Dk] and values [B,K,n,C,Dv], in the stored frame."""
    part = {s.name: encoder.decode_tile(dict(tiles[s.name]), s.encode_role, s.dim)
            for s in spec.streams}  # fmt: skip
    return _join([part[s.name] for s in spec.key_streams]), _join(
        [part[s.name] for s in spec.value_streams]
    )


def _turned(streams: Sequence[StreamSpec], x: Array, turn: Callable[[Array, str], Array]) -> Array:
    """x [B,T,H,D] with each stream's own part turned into or out of its stored frame."""
    parts, at = [], 0
    for stream in streams:
        parts.append(turn(x[..., at : at + stream.dim], stream.encode_role))
        at += stream.dim
    return _join(parts)


def rotate_by(x: Array, shift: Array, inverse_frequencies: Array | None) -> Array:
    """Turns x [B,T,H,D], already at its own position, on by `shift` [B,T] positions (RoPE)."""
    if inverse_frequencies is None:
        return x
    angle = shift.astype(jnp.float32)[..., None] * inverse_frequencies
    return rope(x, jnp.cos(angle), jnp.sin(angle))


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding, halves paired (Su et al., arXiv 2104.09864, in Hugging Face's layout).

    x: [B,T,H,D]; cos, sin: [B,T,R/2] float32 with R ≤ D, channels beyond R pass through.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], -1)


def empty_streams(spec: LayerSpec, batch: int, slots: int) -> Mapping[str, Array]:
    """Zeroed exact slots for each stream, [B,K,slots,D]; no arrays where there are no slots."""
    if slots == 0:
        return {}
    dtype = jnp.dtype(spec.dtype)
    return {s.name: jnp.zeros((batch, s.heads, slots, s.dim), dtype) for s in spec.streams}
