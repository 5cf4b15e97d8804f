"""A cache transform: a few pure functions, and how the four choices make one.

In the manner of `optax.GradientTransformation`: a NamedTuple of functions over pytrees of fixed
shape. `cache` builds the usual one from its choices; a method that is none of them can bring its
own functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.append import QUERY, QUERY_DTYPE, append, flush, keeps_queries
from kvjax.cache.attend import attend, empty_streams
from kvjax.cache.layout import Plan, layout
from kvjax.cache.segments import LayerCache, ModelCache
from kvjax.cache.spec import CacheSpec, LayerSpec, StreamSpec
from kvjax.encode.base import Encoder
from kvjax.place.base import Place
from kvjax.select.base import Select


class CacheTransform(NamedTuple):
    """How a model keeps its past.

    Attributes:
      init: (spec: CacheSpec, batch, capacity) -> ModelCache; allocates, reads no data.
      attend: (layer, query, chunk) -> (out, lse); reads the layer as it stood before the chunk,
        plus the chunk itself.
      append: (layer, chunk, lse) -> layer; the only place where data enters.
      flush: (layers, start, length) -> layers; what all layers do together after each has
        appended a single token. None: nothing.
      finish: (cache, probe) -> cache; whole-model work after prefill and between stretches of
        decoding. `probe(tokens)` runs the model over the frozen cache and returns each layer's
        queries [B,T,H,D].
    """

    init: Callable[[CacheSpec, int, int], ModelCache]
    attend: Callable
    append: Callable
    finish: Callable[[ModelCache, Callable], ModelCache]
    flush: Callable | None = None


def cache(
    select: Select | None = None,
    encode: Encoder | None = None,
    place: Place | None = None,
    sink: int = 0,
    tile: int | None = None,
) -> CacheTransform:
    """A cache from its choices; with none of them, the exact cache.

    Args:
      select: which tokens stay, from `kvjax.select`; None: all.
      encode: in how many bits, from `kvjax.encode`; None: as computed.
      place: where entries live, from `kvjax.place`; None: on the device.
      sink: first tokens that are never encoded or dropped.
      tile: tokens encoded together; must be the encoder's own tile, None takes it from there.

    Returns:
      The transform. Equal arguments give the same object, so nothing compiles twice.

    Raises:
      ValueError: for a negative sink, or a tile that is not the encoder's.
      TypeError: for a choice that is not of its kind.
    """
    select, place = select or Select(), place or Place()
    for name, value, kind in (("select", select, Select), ("place", place, Place)):
        if not isinstance(value, kind):
            raise TypeError(f"cache.{name} is {value!r}; use a member of kvjax.{name}")
    if encode is not None and not isinstance(encode, Encoder):
        raise TypeError(f"cache.encode is {encode!r}; use a member of kvjax.encode")
    if sink < 0:
        raise ValueError(f"cache.sink is {sink}; use 0 or more")
    if tile is not None and encode is not None and tile != encode.tile:
        raise ValueError(
            f"cache.tile is {tile} but cache.encode.tile is {encode.tile}; give both the same"
        )
    return _from_plan(Plan(select, encode, place, sink))


@functools.cache
def _from_plan(plan: Plan) -> CacheTransform:
    init, finish = functools.partial(_init, plan), functools.partial(_finish, plan)
    return CacheTransform(init, attend, append, finish, flush)


def _init(plan: Plan, spec: CacheSpec, batch: int, capacity: int) -> ModelCache:
    if batch < 1:
        raise ValueError(f"batch is {batch}; use 1 or more")
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}; use 1 or more tokens")
    layers = tuple(_init_layer(plan, layer, batch, capacity) for layer in spec.layers)
    return ModelCache(layers, {}, jnp.zeros(batch, jnp.int32), capacity, _from_plan(plan))


def _init_layer(plan: Plan, spec: LayerSpec, batch: int, capacity: int) -> LayerCache:
    here = layout(plan, spec, capacity)
    body: dict[str, Any] = {}
    if plan.encode is not None:
        for stream in spec.streams:
            plan.encode.validate(stream.dim)
        if here.tiles:
            body = {s.name: _empty_tiles(plan.encode, s, batch, here.tiles) for s in spec.streams}
    sink = empty_streams(spec, batch, here.sink)
    recent = dict(empty_streams(spec, batch, here.recent))
    if keeps_queries(plan, here):
        shape = (batch, spec.num_heads, here.recent, spec.key_dim)
        recent[QUERY] = jnp.zeros(shape, QUERY_DTYPE)
    return LayerCache(sink, body, recent, None, spec, plan, here)


def _empty_tiles(
    encoder: Encoder, stream: StreamSpec, batch: int, tiles: int
) -> dict[str, jax.Array]:
    x = jax.ShapeDtypeStruct((batch, stream.heads, encoder.tile, stream.dim), jnp.float32)
    shapes = jax.eval_shape(lambda x: encoder.encode_tile(x, stream.encode_role), x)
    return {
        name: jnp.zeros((*leaf.shape[:2], tiles, *leaf.shape[2:]), leaf.dtype)
        for name, leaf in shapes.items()
    }


def _finish(plan: Plan, cache: ModelCache, probe: Callable) -> ModelCache:
    return plan.select.finish(cache, probe)


def per_layer(default: CacheTransform, layers: Mapping[int, CacheTransform]) -> CacheTransform:
    """Another transform for some layers, such as exact first and last layers.

    Args:
      default: the transform of every layer not named.
      layers: layer index (negative counts from the end) -> transform.

    Raises:
      ValueError: when the transforms read or fill their layers by different functions, or (at
        `init`) for a layer that the model does not have.
    """
    return _per_layer(default, tuple(sorted(layers.items())))


@functools.cache
def _per_layer(
    default: CacheTransform, layers: tuple[tuple[int, CacheTransform], ...]
) -> CacheTransform:
    read = (default.attend, default.append, default.flush)
    for index, other in layers:
        if (other.attend, other.append, other.flush) != read:
            raise ValueError(f"per_layer: layer {index} reads its cache by another function")

    def init(spec: CacheSpec, batch: int, capacity: int) -> ModelCache:
        total = len(spec.layers)
        chosen = [default] * total
        for index, other in layers:
            if not -total <= index < total:
                raise ValueError(f"per_layer: there is no layer {index} among {total}")
            chosen[index] = other
        parts = [
            t.init(CacheSpec((layer,)), batch, capacity)
            for t, layer in zip(chosen, spec.layers, strict=True)
        ]
        shared = {k: v for part in parts for k, v in part.shared.items()}
        held = tuple(part.layers[0] for part in parts)
        return ModelCache(held, shared, parts[0].length, capacity, transform)

    def finish(cache: ModelCache, probe: Callable) -> ModelCache:
        for each in dict.fromkeys([default, *(t for _, t in layers)]):
            cache = each.finish(cache, probe)
        return cache

    transform = CacheTransform(init, default.attend, default.append, finish, default.flush)
    return transform
