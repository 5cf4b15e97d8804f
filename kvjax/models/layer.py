"""One layer through its cache, as a jitted call of its own.

Layers of one kind and shape share a program, however deep the model is. Inside a larger `jit` the
calls are inlined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from kvjax.cache.segments import Chunk, LayerCache
from kvjax.cache.transform import CacheTransform
from kvjax.models.blocks import NOTHING, Added, Block
from kvjax.ops.partials import DECODE


def by_row(x: Array) -> bool:
    """Whether a chunk x [B,T,E] should run one row after another: on a CPU a row's long chunk is
    work enough, and the scores of a whole batch would only fall out of its caches."""
    if x.shape[0] == 1 or x.shape[1] <= DECODE or isinstance(x, jax.core.Tracer):
        return False
    return {device.platform for device in x.devices()} == {"cpu"}


def run_layer(
    transform: CacheTransform,
    block: Block,
    x: Array,
    start: Array,
    length: Array,
    layer: LayerCache,
    beside: Any = None,
    messages: Array | None = None,
    *,
    apart: bool = False,
    donate: bool = False,
) -> tuple[Array, LayerCache, Any]:
    """The residual stream, the cache and the state beside it after one layer.

    Args:
      transform: how the cache is read and filled.
      block: the layer's weights.
      x: [B,T,E], the residual stream, rows left-aligned.
      start: [B] int32, tokens of each row before the chunk.
      length: [B] int32, real tokens of each row in the chunk.
      layer: the layer's cache.
      beside: the state of the module beside the layer's attention; None without one.
      messages: [B,T] int32, what that module may read, or None.
      apart: run one row after another (see `by_row`).
      donate: let the new cache take over the old one's memory.
    """
    graph, state = nnx.split(block)
    run = _donating if donate else _pure
    return run(graph, transform.attend, transform.append, apart, state, x, start, length, layer,
               beside, messages)  # fmt: skip


def _run(
    graph: nnx.GraphDef,
    attend: Callable,
    append: Callable,
    apart: bool,
    state: nnx.State,
    x: Array,
    start: Array,
    length: Array,
    layer: LayerCache,
    beside: Any,
    messages: Array | None,
) -> tuple[Array, LayerCache, Any]:
    block = nnx.merge(graph, state)
    added, beside = block.correct(x, length, beside, messages)
    rows = (x, start, length, layer, added)
    x, chunk, lse = _rows_apart(block, attend, rows) if apart else _rows(block, attend, *rows)
    return x, append(layer, chunk, lse), beside


def _rows(
    block: Block, attend: Callable, x: Array, start: Array, length: Array, layer: LayerCache,
    added: Added = NOTHING,
) -> tuple[Array, Chunk, Array]:  # fmt: skip
    chunk = block.chunk(x, start, length, added)
    out, lse = attend(layer, chunk.query, chunk)
    return block.combine(x, out, added), chunk, lse


def _rows_apart(block: Block, attend: Callable, rows: tuple) -> tuple[Array, Chunk, Array]:
    def one(row: tuple) -> Any:
        x, chunk, lse = _rows(block, attend, *jax.tree.map(lambda leaf: leaf[None], row))
        own = chunk._replace(inverse_frequencies=None)  # the same for all rows
        return jax.tree.map(lambda leaf: leaf[0], (x, own, lse))

    x, chunk, lse = jax.lax.map(one, rows)
    return x, chunk._replace(inverse_frequencies=block.self_attn.inverse_frequencies()), lse


_pure = jax.jit(_run, static_argnums=(0, 1, 2, 3))
_donating = jax.jit(_run, static_argnums=(0, 1, 2, 3), donate_argnums=8)


def flush_layers(
    transform: CacheTransform,
    layers: tuple[LayerCache, ...],
    start: Array,
    length: Array,
    *,
    donate: bool = False,
) -> tuple[LayerCache, ...]:
    """What all layers do together after a step of one token (`CacheTransform.flush`)."""
    if transform.flush is None:
        return layers
    run = _flush_donating if donate else _flush_pure
    return run(transform.flush, layers, start, length)


def _flush(
    flush: Callable, layers: tuple[LayerCache, ...], start: Array, length: Array
) -> tuple[LayerCache, ...]:
    return flush(layers, start, length)


_flush_pure = jax.jit(_flush, static_argnums=0)
_flush_donating = jax.jit(_flush, static_argnums=0, donate_argnums=1)


def probe_layer(
    transform: CacheTransform,
    block: Block,
    x: Array,
    start: Array,
    length: Array,
    layer: LayerCache,
    beside: Any = None,
) -> tuple[Array, Array]:
    """The residual stream after one layer over a frozen cache, and its queries [B,T,H,D]."""
    graph, state = nnx.split(block)
    if block.beside is not None and beside is not None:
        beside = block.beside.frozen(beside)
    return _probe(graph, transform.attend, state, x, start, length, layer, beside)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _probe(
    graph: nnx.GraphDef,
    attend: Callable,
    state: nnx.State,
    x: Array,
    start: Array,
    length: Array,
    layer: LayerCache,
    beside: Any,
) -> tuple[Array, Array]:
    block = nnx.merge(graph, state)
    added, _ = block.correct(x, length, beside, None)
    x, chunk, _ = _rows(block, attend, x, start, length, layer, added)
    return x, chunk.query
