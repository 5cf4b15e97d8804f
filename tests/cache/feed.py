"""Feeds keys and values into a layer's cache chunk by chunk, and a plain attention to compare."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.segments import Chunk, LayerCache, ModelCache
from kvjax.cache.spec import CacheSpec, LayerSpec, heads_spec
from kvjax.cache.transform import CacheTransform

HEADS, KV, DIM = 6, 3, 16


def layer_spec(
    window=None, softcap=None, heads=HEADS, kv=KV, dim=DIM, dtype="float32"
) -> LayerSpec:
    return heads_spec(heads, kv, dim, scale=dim**-0.5, softcap=softcap, window=window, dtype=dtype)


def draw(seed: int, batch: int, length: int, spec: LayerSpec):
    """q [B,S,H,D], k and v [B,S,K,D]: keys and values drawn apart."""
    r = np.random.default_rng(seed)
    kv, dim = spec.kv_heads, spec.streams[0].dim
    q = r.normal(size=(batch, length, spec.num_heads, dim))
    k = r.normal(size=(batch, length, kv, dim)) + r.normal(size=(kv, dim))
    v = r.normal(size=(batch, length, kv, dim)) * 2
    return tuple(np.asarray(x, np.float32) for x in (q, k, v))


def empty(transform: CacheTransform, spec: LayerSpec, batch: int, capacity: int) -> ModelCache:
    return transform.init(CacheSpec((spec,)), batch, capacity)


@functools.partial(jax.jit, static_argnums=0)
def _step(transform, layer, q, k, v, start, length, inverse):
    entries = {"k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2)}
    chunk = Chunk(entries, start, length, q, inverse_frequencies=inverse)
    out, lse = transform.attend(layer, q, chunk)
    layer = transform.append(layer, chunk, lse)
    if q.shape[1] == 1:
        (layer,) = transform.flush((layer,), start, length)
    return out, layer


def feed(transform, layer: LayerCache, q, k, v, widths, start=None, lengths=None, inverse=None):
    """Runs chunks of the given widths; returns out [B,S,H,D] and the layer.

    lengths: [chunks,B], how many tokens of each chunk are real in each row (None: all). The rows
    of q, k, v hold each row's real tokens one after another.
    """
    batch = q.shape[0]
    at = np.zeros(batch, np.int32) if start is None else np.asarray(start, np.int32)
    taken = np.zeros(batch, np.int32)
    out = np.zeros((batch, *q.shape[1:3], v.shape[-1]), np.float32)
    for i, width in enumerate(widths):
        real = np.full(batch, width, np.int32) if lengths is None else np.asarray(lengths[i])
        index = taken[:, None] + np.arange(width)
        index = np.minimum(index, q.shape[1] - 1)
        part = [np.take_along_axis(x, index[..., None, None], 1) for x in (q, k, v)]
        got, layer = _step(
            transform, layer, *part, jnp.asarray(at + taken), jnp.asarray(real), inverse
        )
        for b in range(batch):
            out[b, taken[b] : taken[b] + real[b]] = np.asarray(got)[b, : real[b]]
        taken = taken + real
    return out, layer


def plain(q, k, v, spec: LayerSpec, visible) -> np.ndarray:
    """Attention in float64; visible [S,S] bool says which keys (columns) each query may read."""
    group = spec.num_heads // spec.kv_heads
    k, v = (np.repeat(x.astype(np.float64), group, 2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q.astype(np.float64), k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    scores = np.where(visible, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", p, v)


def causal(length: int, window=None, sink: int = 0) -> np.ndarray:
    i, j = np.arange(length)[:, None], np.arange(length)
    seen = j <= i
    if window is not None:
        seen &= (j > i - window) | (j < sink)
    return seen


def valid_slots(layer: LayerCache, length: np.ndarray) -> dict[str, np.ndarray]:
    """Masks [B,slots] of `sink`, `recent` and `body` (tiles), by the layout's rules."""
    here = layer.layout
    rest = np.maximum(length - here.sink, 0)[:, None]
    slots = np.arange(here.recent)
    if here.tile and layer.plan.encode.keeps_values:
        recent = slots < np.minimum(rest, here.tile)
    elif here.tile:
        recent = slots < rest % here.tile
    else:
        recent = slots < np.minimum(rest, here.recent)
    tiles = np.arange(here.tiles) < np.minimum(rest // max(here.tile, 1), here.tiles)
    return {"sink": np.arange(here.sink) < length[:, None], "recent": recent, "body": tiles}


def masked(layer: LayerCache, length: np.ndarray, fill) -> LayerCache:
    """The layer with `fill(dtype)` in every slot that holds nothing."""
    import dataclasses

    masks = valid_slots(layer, np.asarray(length))

    def put(mask):
        def one(x):
            wide = mask.reshape(mask.shape[0], 1, mask.shape[1], *[1] * (x.ndim - 3))
            return jnp.where(wide, x, fill(x.dtype))

        return one

    return dataclasses.replace(
        layer,
        sink=jax.tree.map(put(masks["sink"]), layer.sink),
        recent=jax.tree.map(put(masks["recent"]), layer.recent),
        body=jax.tree.map(put(masks["body"]), layer.body),
    )


def zeros(dtype):
    return jnp.zeros((), dtype)


def poison(dtype):
    """NaN; for packed words the pattern whose two 16-bit halves are both NaN."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(jnp.nan, dtype)
    return jnp.asarray(0x7E007E00 if jnp.dtype(dtype).itemsize == 4 else 0x7E, dtype)
