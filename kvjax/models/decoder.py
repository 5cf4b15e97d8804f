"""The decoder: embedding, layers, head; run without a cache, or step by step through one.

The layers run outside one big program: each is its own jitted call, so a model compiles one layer
per kind however deep it is, and inside a larger `jit` (a stretch of decoding, a training step)
the same calls are inlined. Rows are left-aligned first, so padding on either side is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from kvjax.cache.attend import own_partial
from kvjax.cache.segments import ModelCache
from kvjax.cache.spec import CacheSpec
from kvjax.cache.transform import CacheTransform
from kvjax.models.blocks import Block, RMSNorm, Tensors, few_rows, layer_spec, to_array
from kvjax.models.config import DecoderConfig
from kvjax.models.layer import by_row, flush_layers, probe_layer, run_layer
from kvjax.models.placed import by_rows
from kvjax.models.rows import Aligned, align, check_room, checked_tokens, restore
from kvjax.ops.partials import Visible

DTYPES = ("float32", "bfloat16", "float16")
BESIDE = "beside"  # in a cache's `shared`: the state of each layer's `beside`, None for one without


class Embed(nnx.Module):
    """A token embedding, weight [V,E]; tied models also use it as their head."""

    def __init__(self, tensor: np.ndarray, dtype: str) -> None:
        self.weight = nnx.Param(to_array(tensor, dtype))


class Decoder(nnx.Module):
    """A decoder-only transformer.

    Args:
      config: the model's config.
      tensors: weights by Hugging Face name and shape.
      dtype: dtype of weights and computation, `"float32"`, `"bfloat16"` or `"float16"`. Norms,
        softmax and logits are computed in float32 whatever it is.

    Raises:
      ValueError: for another dtype.
      KeyError: for a tensor that is missing.
    """

    def __init__(self, config: DecoderConfig, tensors: Tensors, dtype: str = "float32") -> None:
        dtype = jnp.dtype(dtype).name
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; use one of {DTYPES}")
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embed(tensors["model.embed_tokens.weight"], dtype)
        self.layers = nnx.List(
            Block(tensors, f"model.layers.{i}", config, layer, dtype)
            for i, layer in enumerate(config.layers)
        )
        self.norm = RMSNorm(tensors, "model.norm", config, dtype)
        tied = config.tie_embeddings
        self.lm_head = None if tied else Embed(tensors["lm_head.weight"], dtype)

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights by Hugging Face name, in Hugging Face's shapes and this model's dtype."""
        found = {}
        for path, leaf in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            *parts, last = (str(p) for p in path)
            value = np.asarray(leaf[...])
            name = ".".join(parts if parts[0] == "lm_head" else ["model", *parts])
            if last == "kernel":
                found[f"{name}.weight"] = np.ascontiguousarray(value.T)
            else:
                found[f"{name}.{last}"] = value
        return found

    def cache_spec(self, dtype: str | None = None) -> CacheSpec:
        """What this model's cache must hold; dtype of exact entries, None: the model's own."""
        return cache_spec(self.config, dtype or self.dtype)


def cache_spec(config: DecoderConfig, dtype: str) -> CacheSpec:
    """What a cache must hold for a model of this config; needs no weights."""
    return CacheSpec(tuple(layer_spec(config, layer, dtype) for layer in config.layers))


# ---- pieces, each jitted ---------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _embed(scale: float, weight: Array, tokens: Array, mask: Array | None) -> tuple:
    aligned = align(tokens, mask)
    if tokens.ndim == 3:  # inputs in place of tokens
        return aligned.tokens.astype(weight.dtype), aligned
    return weight[aligned.tokens] * jnp.asarray(scale, weight.dtype), aligned


def embed(model: Decoder, tokens: Array) -> Array:
    """Tokens [B,T] -> the inputs [B,T,E] that the first layer sees; `step`, `forward` and
    `generate` take such inputs in place of tokens."""
    return _embed(model.config.embed_scale, model.embed_tokens.weight[...], tokens, None)[0]


@jax.jit
def _finish(norm: RMSNorm, x: Array, back: Array | None) -> Array:
    return restore(norm(x), back)


@functools.partial(jax.jit, static_argnums=0)
def _unembed(softcap: float | None, weight: Array, hidden: Array) -> Array:
    def product(x: Array) -> Array:
        return jnp.einsum("bte,ve->btv", x, weight, preferred_element_type=jnp.float32)

    logits = few_rows(hidden, product)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


# ---- through a cache -------------------------------------------------------------------------


def step_aligned(
    model: Decoder, tokens: Array, cache: ModelCache, mask: Array | None, donate: bool,
    messages: Array | None = None,
) -> tuple[Array, Aligned, ModelCache]:  # fmt: skip
    """Hidden states [B,T,E] before the last norm, left-aligned, and the cache after the chunk."""
    x, aligned = _embed(model.config.embed_scale, model.embed_tokens.weight[...], tokens, mask)
    messages = _aligned(messages, mask)
    transform, apart, layers, states = cache.transform, by_row(x), [], []
    for block, layer, beside in zip(model.layers, cache.layers, _beside(cache), strict=True):
        x, layer, beside = run_layer(transform, block, x, cache.length, aligned.length, layer,
                                     beside, messages, apart=apart, donate=donate)  # fmt: skip
        layers.append(layer)
        states.append(beside)
    held = tuple(layers)
    if tokens.shape[1] == 1:
        held = flush_layers(transform, held, cache.length, aligned.length, donate=donate)
    length = cache.length + aligned.length
    shared = cache.shared | {BESIDE: tuple(states)} if BESIDE in cache.shared else cache.shared
    after = ModelCache(held, shared, length, cache.capacity, transform)
    return x, aligned, after


def _beside(cache: ModelCache) -> tuple:
    return cache.shared.get(BESIDE, (None,) * len(cache.layers))


def _aligned(messages: Array | None, mask: Array | None) -> Array | None:
    """messages [B,T] moved as the tokens they belong to."""
    return None if messages is None else align(messages, mask).tokens


def step_hidden(
    model: Decoder,
    tokens: Array,
    cache: ModelCache,
    mask: Array | None = None,
    donate: bool = False,
    messages: Array | None = None,
) -> tuple[Array, ModelCache]:
    """As `kvjax.step`, but hidden states [B,T,E] after the last norm instead of logits."""
    tokens, mask = checked_tokens(model.config, tokens, mask)
    check_room(cache, tokens, mask)
    x, aligned, after = step_aligned(model, tokens, cache, mask, donate, messages)
    return _finish(model.norm, x, aligned.back), after


def unembed(model: Decoder, hidden: Array) -> Array:
    """Hidden states [B,T,E] after the last norm -> logits [B,T,V] float32."""
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    return _unembed(model.config.final_softcap, head.weight[...], hidden)


def step(
    model: Decoder,
    tokens: Array,
    cache: ModelCache,
    mask: Array | None = None,
    donate: bool = False,
    messages: Array | None = None,
) -> tuple[Array, ModelCache]:
    """Runs T new tokens of each row through the cache: a prefill chunk or a decoding step.

    Args:
      model: the decoder.
      tokens: [B,T] int, T ≥ 1; or inputs [B,T,E], what the first layer is to see (`embed`).
      cache: the cache so far; it is not changed, unless donated.
      mask: [B,T] bool, True at real tokens; padding may stand on either side. None: all real.
      donate: let the new cache take over the old one's memory. The old one is then unusable.
      messages: [B,T] int32, the message that each token belongs to, −1: none. For a memory that
        writes a message at a time (`kvjax.memory`); nothing else reads it.

    Returns:
      logits [B,T,V] float32 (0 at padded places), and the cache with the real tokens added.

    Raises:
      ValueError: for tokens of a wrong shape, type or range, or rows that outgrow the capacity.
    """
    hidden, cache = step_hidden(model, tokens, cache, mask, donate, messages)
    return unembed(model, hidden), cache


def probe(model: Decoder, cache: ModelCache) -> Callable[[Array], tuple[Array, ...]]:
    """A function tokens [B,T] -> each layer's queries [B,T,H,D] over the frozen cache."""

    def run(tokens: Array) -> tuple[Array, ...]:
        tokens, _ = checked_tokens(model.config, tokens, None)
        x, aligned = _embed(model.config.embed_scale, model.embed_tokens.weight[...], tokens, None)
        queries = []
        for block, layer, beside in zip(model.layers, cache.layers, _beside(cache), strict=True):
            x, query = probe_layer(cache.transform, block, x, cache.length, aligned.length, layer,
                                   beside)  # fmt: skip
            queries.append(query)
        return tuple(queries)

    return run


def finish(model: Decoder, cache: ModelCache) -> ModelCache:
    """The transform's whole-model work: call it after prefill, and between stretches."""
    return cache.transform.finish(cache, probe(model, cache))


# ---- without a cache -------------------------------------------------------------------------


def forward(model: Decoder, tokens: Array, mask: Array | None = None) -> Array:
    """Logits of whole sequences, without a cache.

    Args:
      model: the decoder.
      tokens: [B,T] int; or inputs [B,T,E], what the first layer is to see (`embed`).
      mask: [B,T] bool, True at real tokens; padding may stand on either side. None: all real.

    Returns:
      logits [B,T,V] float32, 0 at padded places.

    Raises:
      ValueError: for tokens of a wrong shape, type or range.
    """
    tokens, mask = checked_tokens(model.config, tokens, mask)
    graph, state = nnx.split(model)
    return unembed(model, _forward(graph, state, tokens, mask))


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph: nnx.GraphDef, state: nnx.State, tokens: Array, mask: Array | None) -> Array:
    return forward_hidden(nnx.merge(graph, state), tokens, mask)


def forward_hidden(
    model: Decoder,
    tokens: Array,
    mask: Array | None = None,
    checkpoint: bool = False,
    *,
    segments: Array | None = None,
    causal: bool = True,
) -> Array:
    """Hidden states [B,T,E] after the last norm; traceable and differentiable.

    A memory beside the layers starts empty. Layers that repeat with a period are stacked and
    scanned, so depth costs no compile time.

    Args:
      model: the decoder.
      tokens: [B,T] int32, or inputs [B,T,E].
      mask: [B,T] bool or None.
      checkpoint: recompute each layer in the backward pass (activation checkpointing).
      segments: [B,T] int32, the document of each token in a packed row: a token reads its own
        document alone. Positions run on, which RoPE cannot tell from a restart. Needs no mask.
      causal: False: a token also reads what comes after it (an encoder).

    Raises:
      ValueError: for segments and a mask, or a layer with a window that is not causal.
    """
    return forward_beside(
        model, tokens, init_beside(model, tokens.shape[0]), mask,
        checkpoint=checkpoint, segments=segments, causal=causal,
    )[0]  # fmt: skip


def forward_beside(
    model: Decoder,
    tokens: Array,
    beside: tuple,
    mask: Array | None = None,
    messages: Array | None = None,
    checkpoint: bool = False,
    *,
    segments: Array | None = None,
    causal: bool = True,
) -> tuple[Array, tuple]:
    """As `forward_hidden`, from given states beside the layers; also the states afterwards.

    Args:
      beside: a state for each layer, None for one without; `init_beside` makes those before the
        first token.
      messages: [B,T] int32 or None, see `step`.
    """
    if segments is not None and mask is not None:
        raise ValueError("segments and mask exclude each other; give padding a segment of its own")
    if not causal and any(layer.window is not None for layer in model.config.layers):
        raise ValueError("causal is False but a layer has a window; use a model without windows")
    x, aligned = _embed(model.config.embed_scale, model.embed_tokens.weight[...], tokens, mask)
    messages, start = _aligned(messages, mask), jnp.zeros_like(aligned.length)
    parts = [nnx.split(block) for block in model.layers]
    graphs = tuple(graph for graph, _ in parts)
    size = _period(tuple(zip(model.config.layers, graphs, strict=True)))
    specs = model.cache_spec().layers

    def run(x: Array, layers: tuple) -> tuple[Array, tuple]:
        after = []
        for graph, spec, (state, held) in zip(graphs, specs, layers, strict=False):
            block = nnx.merge(graph, state)
            added, held = block.correct(x, aligned.length, held, messages)
            after.append(held)
            chunk = block.chunk(x, start, aligned.length, added)
            visible = Visible(causal=causal, window=spec.window)
            own = own_partial(spec, chunk.query, chunk, visible, checkpoint, segments)
            x = by_rows(block.combine(x, own.out, added))
        return x, tuple(after)

    layers = [(state, held) for (_, state), held in zip(parts, beside, strict=True)]
    body = jax.checkpoint(run) if checkpoint else run
    x, after = jax.lax.scan(body, by_rows(x), _stacked(layers, size))
    return restore(model.norm(x), aligned.back), _unstacked(after, len(layers) // size)


def init_beside(model: Decoder, batch: int) -> tuple:
    """The states of the modules beside the layers before the first token; None where there is no
    module."""
    besides = [block.beside for block in model.layers]
    return tuple(None if module is None else module.init(batch) for module in besides)


def _stacked(layers: Sequence, size: int) -> tuple:
    """A tree for each layer -> a tree for each place in the period, its leaves [count,...]."""
    return tuple(jax.tree.map(lambda *xs: jnp.stack(xs), *layers[i::size]) for i in range(size))


def _unstacked(places: tuple, count: int) -> tuple:
    return tuple(jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count) for tree in places)


def period(config: DecoderConfig) -> int:
    """The shortest run of layers whose repetition is the whole model."""
    return _period(config.layers)


def _period(layers: tuple) -> int:
    count = len(layers)
    for size in range(1, count + 1):
        if count % size == 0 and layers == layers[:size] * (count // size):
            return size
    return count


def init_cache(
    model: Decoder,
    transform: CacheTransform,
    batch: int,
    capacity: int,
    dtype: str | None = None,
) -> ModelCache:
    """An empty cache for `batch` rows of up to `capacity` tokens.

    Args:
      model: the decoder.
      transform: from `kvjax.cache`.
      batch: B.
      capacity: S, the most tokens a row may hold.
      dtype: dtype of exact entries; None: the model's own.

    Raises:
      ValueError: for sizes below 1, or a model that the transform cannot serve.
    """
    empty = transform.init(model.cache_spec(dtype), batch, capacity)
    states = init_beside(model, batch)
    if all(state is None for state in states):
        return empty
    return replace(empty, shared=empty.shared | {BESIDE: states})
