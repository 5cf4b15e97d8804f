"""Partial attention: each piece of a cache answers a query with (out, lse), and answers merge.

A partial over a set of entries is `out = Σ softmax(s)·v` over that set alone and
`lse = log Σ exp(s)`. Two partials over disjoint sets merge exactly into the partial over their
union (the online softmax of Milakov & Gimelshein, arXiv 1805.02867; the split of
"Flash-Decoding", Dao et al. 2023), so no reader ever needs to know of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

DECODE = 8  # chunks of up to so many tokens read a segment in one go: their scores are small


class Partial(NamedTuple):
    """out [B,T,H,D] float32 and lse [B,T,H] float32; lse = −inf (and out = 0) where empty."""

    out: Array
    lse: Array


class Scoring(NamedTuple):
    """How queries and keys make scores: `scale` multiplies q·k; with a `softcap` scores become
    softcap·tanh(score / softcap) (Gemma 2)."""

    scale: float
    softcap: float | None = None

    def __call__(self, products: Array) -> Array:
        scores = products * self.scale
        if self.softcap is None:
            return scores
        return self.softcap * jnp.tanh(scores / self.softcap)


class Block(NamedTuple):
    """A run of entries that one loop step reads.

    key [B,K,S,Dk], or tiles with channels first, [B,K,n,Dk,C] with n·C = S; value [B,K,S,Dv];
    position [B,S] int32 (the tokens' positions); valid [B,S]. What lies in invalid entries never
    matters; it may be NaN. `bias` [B,1|T,S] float32 is added to the scores. `clean`: invalid
    entries' values are 0 already. `stored`: key and value are the cache's own arrays, so that to
    mask them would be to copy them.
    """

    key: Array
    value: Array
    position: Array
    valid: Array
    bias: Array | None = None
    clean: bool = False
    stored: bool = False


class Visible(NamedTuple):
    """Which entries a query may read, by position; every condition that is given must hold.

    Attributes:
      causal: not after the query.
      window: among the newest `window` up to the query, itself included, or before `sink`.
      sink: see `window`.
      beyond: the opposite of `window`: before `sink` and out of the query's window.
    """

    causal: bool = False
    window: int | None = None
    sink: int = 0
    beyond: bool = False

    def __call__(self, entry: Array, query: Array) -> Array:
        """entry [B,1,S] and query [B,T,1] positions -> [B,T,S] bool."""
        mask = entry <= query if self.causal else jnp.full((1, 1, 1), True)
        if self.window is None:
            return mask
        near = entry > query - self.window
        if self.beyond:
            return mask & ~near & (entry < self.sink)
        return mask & (near | (entry < self.sink))


_ALL = Visible()


class _State(NamedTuple):
    top: Array  # [B,K,Q] the running maximum of the scores
    total: Array  # [B,K,Q] Σ exp(s − top)
    out: Array  # [B,K,Q,Dv] Σ exp(s − top)·v


def merge(a: Partial, b: Partial) -> Partial:
    """The partial over the union of two disjoint sets of entries; either may be empty."""
    top = jnp.maximum(a.lse, b.lse)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    wa, wb = jnp.exp(a.lse - top), jnp.exp(b.lse - top)
    total = wa + wb
    share = jnp.where(total > 0, total, 1.0)
    out = (wa / share)[..., None] * a.out + (wb / share)[..., None] * b.out
    return Partial(out, jnp.where(total > 0, top + jnp.log(share), -jnp.inf))


def group_queries(query: Array, kv_heads: int) -> Array:
    """[B,T,H,D] -> [B,K,G·T,D]: all queries that read one KV head, heads before tokens."""
    b, t, h, d = query.shape
    grouped = query.reshape(b, t, kv_heads, h // kv_heads, d).transpose(0, 2, 3, 1, 4)
    return grouped.reshape(b, kv_heads, (h // kv_heads) * t, d)


def ungroup(x: Array, tokens: int) -> Array:
    """[B,K,G·T,...] -> [B,T,H,...], the inverse of `group_queries`."""
    b, k, q = x.shape[:3]
    x = x.reshape(b, k, q // tokens, tokens, *x.shape[3:])
    return jnp.moveaxis(x, 3, 1).reshape(b, tokens, k * (q // tokens), *x.shape[4:])


def _update(
    state: _State, query: Array, mask: Array, block: Block, scoring: Scoring
) -> _State:
    scores = scoring(_scores(query, block.key))
    b, k, q, s = scores.shape
    tokens = mask.shape[1] if block.bias is None else max(mask.shape[1], block.bias.shape[1])
    scores = scores.reshape(b, k, q // tokens, tokens, s)
    if block.bias is not None:
        scores = scores + block.bias[:, None, None]
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf).reshape(b, k, q, s)
    top = jnp.maximum(state.top, scores.max(-1))
    safe = jnp.where(jnp.isfinite(top), top, 0.0)
    p = jnp.exp(scores - safe[..., None])
    keep = jnp.exp(state.top - safe)
    new = _weigh(p, block)
    return _State(top, keep * state.total + p.sum(-1), keep[..., None] * state.out + new)


def _scores(query: Array, key: Array) -> Array:
    """q·k in float32, [B,K,Q,S]. Over tiles it is one product a tile: to lay their channels out
    side by side first takes several times as long as the product itself."""
    if key.ndim == 4:
        return jnp.einsum("bkqd,bksd->bkqs", query, key, preferred_element_type=jnp.float32)
    b, k, n, _, c = key.shape
    wide = jnp.broadcast_to(query[:, :, None], (b, k, n, *query.shape[2:]))
    scores = jnp.einsum("bknqd,bkndc->bknqc", wide, key, preferred_element_type=jnp.float32)
    return scores.swapaxes(2, 3).reshape(b, k, query.shape[2], n * c)


def _weigh(p: Array, block: Block) -> Array:
    """Σ p·v, [B,K,Q,Dv] float32. Invalid entries have p = 0, but 0·NaN would still be NaN.

    Masking the values of a stored segment would copy them, so there they are masked only if the
    plain sum came out other than finite.
    """

    def plain(p: Array, value: Array) -> Array:
        p = p.astype(value.dtype)
        return jnp.einsum("bkqs,bksd->bkqd", p, value, preferred_element_type=jnp.float32)

    def masked(p: Array, value: Array) -> Array:
        return plain(p, jnp.where(block.valid[:, None, :, None], value, 0))

    if block.clean:
        return plain(p, block.value)
    if not block.stored:
        return masked(p, block.value)
    out = plain(p, block.value)
    return lax.cond(jnp.isfinite(out).all(), lambda *_: out, masked, p, block.value)


def block_slots(i: Array | int, width: int, size: int) -> tuple[Array, Array]:
    """Slots of block i, [width], and which of them no earlier block has read: the last block
    starts early when the width does not divide the size."""
    base = jnp.minimum(i * width, size - width)
    index = base + jnp.arange(width, dtype=jnp.int32)
    return index, index >= i * width


def read(
    query: Array,
    positions: Array,
    load: Callable[[Array | int], Block],
    count: Array | int,
    scoring: Scoring,
    visible: Visible = _ALL,
    checkpoint: bool = False,
) -> Partial:
    """The partial over `count` blocks of entries, read one after another.

    Args:
      query: [B,T,H,Dk], in the frame in which the entries are stored.
      positions: [B,T] int32, the queries' positions.
      load: block index -> `Block`.
      count: how many blocks hold anything; a traced count costs only the blocks that exist, a
        Python int can be differentiated through.
      scoring: products q·k -> scores.
      visible: which of the valid entries a query may read.
      checkpoint: recompute a block's scores in the backward pass rather than keep them.
    """
    tokens = query.shape[1]
    key, value = jax.eval_shape(lambda: tuple(load(0))[:2])
    grouped = group_queries(query, key.shape[1])
    shape = grouped.shape[:3]
    state = _State(
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, value.shape[-1]), jnp.float32),
    )

    def body(i: Array | int, state: _State) -> _State:
        block = load(i)
        mask = visible(block.position[:, None, :], positions[:, :, None])
        return _update(state, grouped, mask & block.valid[:, None, :], block, scoring)

    if checkpoint:
        body = jax.checkpoint(body)
    state = (
        body(0, state)
        if isinstance(count, int) and count == 1
        else lax.fori_loop(0, count, body, state)
    )
    total = jnp.where(state.total > 0, state.total, 1.0)
    lse = jnp.where(state.total > 0, state.top + jnp.log(total), -jnp.inf)
    return Partial(ungroup(state.out / total[..., None], tokens), ungroup(lse, tokens))
