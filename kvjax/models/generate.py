"""Generation: prefill in chunks, then compiled stretches of decoding.

A stretch runs up to τ steps inside one program, so no step passes through Python; between two
stretches come the stop check and the transform's `finish`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from kvjax.cache.segments import ModelCache
from kvjax.cache.transform import CacheTransform
from kvjax.cache.transform import cache as exact_cache
from kvjax.models.decoder import (
    Decoder,
    finish,
    init_cache,
    step_aligned,
    unembed,
)
from kvjax.models.rows import checked_tokens

STRETCH = 64  # τ, steps between two stop checks
PREFILL = 512  # tokens of a prefill chunk
CAPACITY_STEP = 256  # capacities are rounded up to this, so that prompts share programs


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: 0 takes the most likely token; otherwise logits are divided by it.
      top_k: keep only the k most likely tokens; 0 keeps all.
      top_p: keep the fewest most likely tokens whose probabilities sum to at least this.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; use 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; use 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; use a number in (0, 1]")

    def __call__(self, logits: Array, key: Array) -> Array:
        """logits [B,V] float32 -> tokens [B] int32."""
        if self.temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k:
            least = lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p < 1:
            ranked = jnp.flip(jnp.sort(logits, -1), -1)
            share = jax.nn.softmax(ranked, -1)
            # A token stays if what is more likely than it does not reach top_p yet.
            kept = jnp.where(jnp.cumsum(share, -1) - share < self.top_p, ranked, jnp.inf)
            logits = jnp.where(logits < kept.min(-1, keepdims=True), -jnp.inf, logits)
        return jax.random.categorical(key, logits).astype(jnp.int32)


def prefill(
    model: Decoder, tokens: Array, cache: ModelCache, mask: Array | None = None,
    chunk: int = PREFILL, donate: bool = False,
) -> tuple[Array, ModelCache]:  # fmt: skip
    """Feeds prompts into a cache chunk by chunk.

    Args:
      model: the decoder.
      tokens: [B,T] int, the prompts; or inputs [B,T,E] (see `kvjax.step`).
      cache: the cache to append to; it is not changed, unless donated.
      mask: [B,T] bool, True at real tokens, padding on either side; None: all real.
      chunk: tokens per chunk.
      donate: let the new cache take over the old one's memory.

    Returns:
      logits [B,V] float32 after each row's last real token, and the cache.
    """
    tokens, mask = checked_tokens(model.config, tokens, mask)
    prompts, count = _left_aligned(tokens, mask)
    batch, width = prompts.shape[:2]
    last = jnp.zeros((batch, 1, model.config.hidden_size), jnp.dtype(model.dtype))
    for at in range(0, width, chunk):
        piece = prompts[:, at : at + chunk]
        here = np.clip(count - at, 0, piece.shape[1])
        ragged = bool((here < piece.shape[1]).any())
        real = jnp.asarray(np.arange(piece.shape[1]) < here[:, None]) if ragged else None
        x, _, cache = step_aligned(model, jnp.asarray(piece), cache, real, donate or at > 0)
        ends = jnp.asarray((count > at) & (count <= at + chunk))
        last = _pick(x, jnp.asarray(np.maximum(here - 1, 0)), ends, last)
    return unembed(model, model.norm(last))[:, 0], cache


def _left_aligned(tokens: Array, mask: Array | None) -> tuple[Any, np.ndarray]:
    inputs = tokens.ndim == 3
    host = tokens if inputs else np.asarray(tokens)  # inputs stay on the device
    if mask is None:
        return host, np.full(host.shape[0], host.shape[1])
    real = np.asarray(mask)
    order, count = np.argsort(~real, axis=1, kind="stable"), real.sum(1)
    width = max(int(count.max()), 1)
    if inputs:
        return jnp.take_along_axis(host, order[..., None], 1)[:, :width], count
    return np.take_along_axis(host, order, 1)[:, :width], count


@jax.jit
def _pick(x: Array, index: Array, take: Array, last: Array) -> Array:
    found = jnp.take_along_axis(x, index[:, None, None], 1)
    return jnp.where(take[:, None, None], found, last)


@functools.partial(
    jax.jit, static_argnames=("graph", "sampling", "stops", "steps"), donate_argnames=("cache",)
)
def decode_stretch(
    graph: nnx.GraphDef,
    state: nnx.State,
    cache: ModelCache,
    logits: Array,
    key: Array,
    done: Array,
    limit: Array,
    *,
    sampling: Sampling = Sampling(),
    stops: tuple[int, ...] = (),
    steps: int = STRETCH,
) -> tuple[Array, ModelCache, Array, Array, Array]:
    """Up to `limit` ≤ `steps` decoding steps in one program.

    Args:
      graph, state: `nnx.split` of the model.
      cache: donated.
      logits: [B,V] float32, from which the first token is chosen.
      key: a PRNG key.
      done: [B] bool, rows that already stopped; they append nothing.
      limit: int32, how many steps to run; a smaller limit reuses the same program.
      sampling: how tokens are chosen.
      stops: token ids that end a row.
      steps: the size of the output.

    Returns:
      tokens [B,steps] int32 (−1 where a row had stopped), cache, logits, key, done.
    """
    model = nnx.merge(graph, state)
    batch = logits.shape[0]

    def more(carry: tuple) -> Array:
        return (carry[0] < limit) & ~carry[5].all()

    def one(carry: tuple) -> tuple:
        i, found, cache, logits, key, done = carry
        key, now = jax.random.split(key)
        token = sampling(logits, now)
        found = found.at[:, i].set(jnp.where(done, -1, token))
        after = done | jnp.isin(token, jnp.asarray(stops, jnp.int32)) if stops else done
        # A stop token enters the cache too, as it would when a conversation goes on.
        x, _, cache = step_aligned(model, token[:, None], cache, ~done[:, None], False)
        logits = unembed(model, model.norm(x))[:, 0]
        return i + 1, found, cache, logits, key, after

    start = (jnp.int32(0), jnp.full((batch, steps), -1, jnp.int32), cache, logits, key, done)
    _, found, cache, logits, key, done = lax.while_loop(more, one, start)
    return found, cache, logits, key, done


def generate(
    model: Decoder,
    tokens: Array,
    transform: CacheTransform | None = None,
    *,
    max_new_tokens: int = 128,
    mask: Array | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[int] | None = None,
    seed: int = 0,
    cache: ModelCache | None = None,
    return_cache: bool = False,
) -> Any:
    """Continues each row of `tokens`; greedy unless a temperature is given.

    Args:
      model: the decoder.
      tokens: [B,T] int, the prompts; or inputs [B,T,E] (see `kvjax.step`).
      transform: from `kvjax.cache`; None: the exact cache.
      max_new_tokens: the most tokens to add to a row.
      mask: [B,T] bool, True at real tokens, padding on either side; None: all real.
      temperature, top_k, top_p: see `Sampling`.
      stop: token ids that end a row; None: the model's end-of-text ids.
      seed: of the sampling.
      cache: continue from this cache instead of an empty one. It is not changed, so one context
        answers any number of questions.
      return_cache: also return the cache after the last token.

    Returns:
      The new tokens alone, int32 [B,n] with n ≤ max_new_tokens; a row ends with its stop token
      and is filled up with the padding id (or the stop token) behind it. With `return_cache`, a
      pair of them and the cache.

    Raises:
      ValueError: for bad arguments, or a cache without room for the prompt and the new tokens.
    """
    sampling = Sampling(temperature, top_k, top_p)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; use 1 or more")
    tokens, mask = checked_tokens(model.config, tokens, mask)
    batch, width = tokens.shape[:2]
    prompt = np.full(batch, width) if mask is None else np.asarray(mask).sum(1)
    own = cache is None
    if cache is None:
        room = -(-(int(prompt.max()) + max_new_tokens) // CAPACITY_STEP) * CAPACITY_STEP
        cache = init_cache(model, transform or exact_cache(), batch, room)
    elif transform is not None and transform != cache.transform:
        raise ValueError("transform is another one than the cache's; give one of the two")
    _check_generation(cache, batch, prompt, max_new_tokens)
    stops = model.config.eos_ids if stop is None else tuple(int(s) for s in stop)
    logits, cache = prefill(model, tokens, cache, mask, donate=own)
    cache = finish(model, cache)
    found, cache = _decode(model, cache, logits, sampling, stops, max_new_tokens, seed)
    filler = model.config.pad_id if model.config.pad_id is not None else (stops or (0,))[0]
    found = np.where(found < 0, filler, found)
    return (found, cache) if return_cache else found


def _check_generation(cache: ModelCache, batch: int, prompt: np.ndarray, new: int) -> None:
    if cache.length.shape[0] != batch:
        raise ValueError(f"tokens has {batch} rows and the cache {cache.length.shape[0]}")
    if prompt.min() < 1:
        raise ValueError("a row of tokens is all padding; every row needs a real token")
    longest = int((np.asarray(cache.length) + prompt).max()) + new
    if longest > cache.capacity:
        raise ValueError(
            f"prompt and new tokens take {longest} but the cache's capacity is {cache.capacity}; "
            "lower max_new_tokens or give a larger cache"
        )


def _decode(
    model: Decoder, cache: ModelCache, logits: Array, sampling: Sampling,
    stops: tuple[int, ...], new: int, seed: int,
) -> tuple[np.ndarray, ModelCache]:  # fmt: skip
    graph, state = nnx.split(model)
    key, done = jax.random.key(seed), jnp.zeros(logits.shape[0], bool)
    parts: list[np.ndarray] = []
    for at in range(0, new, STRETCH):
        if at:
            cache = finish(model, cache)
        limit = min(STRETCH, new - at)
        found, cache, logits, key, done = decode_stretch(
            graph, state, cache, logits, key, done, jnp.int32(limit), sampling=sampling, stops=stops
        )
        parts.append(np.asarray(found)[:, :limit])
        if bool(done.all()):
            break
    joined = np.concatenate(parts, 1)
    used = int((joined >= 0).any(0).sum())
    return joined[:, :used], cache
