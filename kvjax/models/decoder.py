"""The decoder: embedding, layers, head; run without a cache, or step by step through one.

The layers run outside one big program: each is its own jitted call, so a model compiles one layer
per kind however deep it is, and inside a larger `jit` (a stretch of decoding, a training step)
the same calls are inlined. Rows are left-aligned first, so padding on either side is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
from kvjax.models.rows import Aligned, align, check_room, checked_tokens, restore
from kvjax.ops.partials import Visible

DTYPES = ("float32", "bfloat16", "float16")


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
    return weight[aligned.tokens] * jnp.asarray(scale, weight.dtype), aligned


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
    model: Decoder, tokens: Array, cache: ModelCache, mask: Array | None, donate: bool
) -> tuple[Array, Aligned, ModelCache]:
    """Hidden states [B,T,E] before the last norm, left-aligned, and the cache after the chunk."""
    x, aligned = _embed(model.config.embed_scale, model.embed_tokens.weight[...], tokens, mask)
    transform, apart, layers = cache.transform, by_row(x), []
    for block, layer in zip(model.layers, cache.layers, strict=True):
        x, layer = run_layer(transform, block, x, cache.length, aligned.length, layer,
                             apart=apart, donate=donate)  # fmt: skip
        layers.append(layer)
    held = tuple(layers)
    if tokens.shape[1] == 1:
        held = flush_layers(transform, held, cache.length, aligned.length, donate=donate)
    length = cache.length + aligned.length
    after = ModelCache(held, cache.shared, length, cache.capacity, transform)
    return x, aligned, after


def step_hidden(
    model: Decoder,
    tokens: Array,
    cache: ModelCache,
    mask: Array | None = None,
    donate: bool = False,
) -> tuple[Array, ModelCache]:
    """As `kvjax.step`, but hidden states [B,T,E] after the last norm instead of logits."""
    tokens, mask = checked_tokens(model.config, tokens, mask)
    check_room(cache, tokens, mask)
    x, aligned, after = step_aligned(model, tokens, cache, mask, donate)
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
) -> tuple[Array, ModelCache]:
    """Runs T new tokens of each row through the cache: a prefill chunk or a decoding step.

    Args:
      model: the decoder.
      tokens: [B,T] int, T ≥ 1.
      cache: the cache so far; it is not changed, unless donated.
      mask: [B,T] bool, True at real tokens; padding may stand on either side. None: all real.
      donate: let the new cache take over the old one's memory. The old one is then unusable.

    Returns:
      logits [B,T,V] float32 (0 at padded places), and the cache with the real tokens added.

    Raises:
      ValueError: for tokens of a wrong shape, type or range, or rows that outgrow the capacity.
    """
    hidden, cache = step_hidden(model, tokens, cache, mask, donate)
    return unembed(model, hidden), cache


def probe(model: Decoder, cache: ModelCache) -> Callable[[Array], tuple[Array, ...]]:
    """A function tokens [B,T] -> each layer's queries [B,T,H,D] over the frozen cache."""

    def run(tokens: Array) -> tuple[Array, ...]:
        tokens, _ = checked_tokens(model.config, tokens, None)
        x, aligned = _embed(model.config.embed_scale, model.embed_tokens.weight[...], tokens, None)
        queries = []
        for block, layer in zip(model.layers, cache.layers, strict=True):
            x, query = probe_layer(cache.transform, block, x, cache.length, aligned.length, layer)
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
      tokens: [B,T] int.
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
    model: Decoder, tokens: Array, mask: Array | None = None, checkpoint: bool = False
) -> Array:
    """Hidden states [B,T,E] after the last norm; traceable and differentiable.

    Layers that repeat with a period are stacked and scanned, so depth costs no compile time.

    Args:
      model: the decoder.
      tokens: [B,T] int32.
      mask: [B,T] bool or None.
      checkpoint: recompute each layer in the backward pass (activation checkpointing).
    """
    x, aligned = _embed(model.config.embed_scale, model.embed_tokens.weight[...], tokens, mask)
    start = jnp.zeros_like(aligned.length)
    size = period(model.config)
    parts = [nnx.split(block) for block in model.layers]
    graphs = [graph for graph, _ in parts[:size]]
    specs = model.cache_spec().layers
    stacked = tuple(
        jax.tree.map(lambda *xs: jnp.stack(xs), *(state for _, state in parts[i::size]))
        for i in range(size)
    )

    def run(x: Array, states: tuple) -> tuple[Array, None]:
        for graph, state, spec in zip(graphs, states, specs, strict=False):
            block = nnx.merge(graph, state)
            chunk = block.chunk(x, start, aligned.length)
            visible = Visible(causal=True, window=spec.window)
            own = own_partial(spec, chunk.query, chunk, visible, checkpoint)
            x = block.combine(x, own.out)
        return x, None

    x, _ = jax.lax.scan(jax.checkpoint(run) if checkpoint else run, x, stacked)
    return restore(model.norm(x), aligned.back)


def period(config: DecoderConfig) -> int:
    """The shortest run of layers whose repetition is the whole model."""
    count = len(config.layers)
    for size in range(1, count + 1):
        if count % size == 0 and config.layers == config.layers[:size] * (count // size):
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
    return transform.init(model.cache_spec(dtype), batch, capacity)
