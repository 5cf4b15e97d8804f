"""What a cache weighs: measured on the live arrays, and by formula without allocating."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.append import QUERY_DTYPE, keeps_queries
from kvjax.cache.segments import LayerCache, ModelCache
from kvjax.cache.spec import CacheSpec
from kvjax.cache.transform import CacheTransform


class Bytes(NamedTuple):
    """Sizes in bytes.

    Attributes:
      device: bytes in device memory.
      host: bytes in host memory, for placements that keep entries there.
      resident: bytes that a decoding step may read.
    """

    device: int
    host: int
    resident: int

    @property
    def total(self) -> int:
        """Device and host together."""
        return self.device + self.host


def nbytes(cache: ModelCache) -> Bytes:
    """The bytes of the arrays that `cache` really holds."""
    device = host = 0
    for leaf in jax.tree.leaves(cache):
        if _on_host(leaf):
            host += leaf.nbytes
        else:
            device += leaf.nbytes
    return Bytes(device, host, device)


def _on_host(leaf: jax.Array) -> bool:
    if jax.default_backend() == "cpu":
        return False  # there is one memory, and it is the device's
    return leaf.sharding.memory_kind in ("pinned_host", "unpinned_host")


def footprint(spec: CacheSpec, transform: CacheTransform, batch: int, capacity: int) -> Bytes:
    """What `nbytes` of a cache of this shape will be, by the layout's formula.

    Args:
      spec: what the model's cache must hold.
      transform: the cache transform.
      batch: B.
      capacity: S, tokens per row.
    """
    shapes = jax.eval_shape(lambda: transform.init(spec, batch, capacity))
    total = sum(_layer_bytes(layer, batch) for layer in shapes.layers)
    total += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.shared))
    total += batch * jnp.dtype(jnp.int32).itemsize  # lengths
    return Bytes(total, 0, total)


def _layer_bytes(layer: LayerCache, batch: int) -> int:
    here, total = layer.layout, 0
    for stream in layer.spec.streams:
        exact = (here.sink + here.recent) * stream.dim * jnp.dtype(layer.spec.dtype).itemsize
        encoder = layer.plan.encode
        tile = encoder.tile_bytes(stream.encode_role, stream.dim) if encoder is not None else 0
        total += batch * stream.heads * (exact + here.tiles * tile)
    if keeps_queries(layer.plan, here):
        query = layer.spec.num_heads * layer.spec.key_dim * jnp.dtype(QUERY_DTYPE).itemsize
        total += batch * here.recent * query
    return total
