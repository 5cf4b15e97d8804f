"""An exact and a lossy stream side by side, layer by layer: where the error is and how it grows.

Both streams see the same tokens. In the `decode` regime the lossy cache stores the lossy stream's
own keys and values, so what is wrong in one block goes into the next. In the `static` regime it
stores the exact stream's, encoded once: no error is passed on from block to block. (KVarN, arXiv
2606.03458, calls them pseudo-decode and static prefill.)
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from ml_collections import ConfigDict
from tqdm import tqdm

import kvjax
from experiments.head_to_head import evaluate
from experiments.head_to_head.session import Session
from experiments.kvarn import drift, keys
from experiments.kvarn.rows import transform_of
from experiments.record import Metrics
from kvjax.cache.segments import Chunk, LayerCache
from kvjax.models.decoder import unembed


class Pair(NamedTuple):
    """The same thing of the exact and of the lossy stream."""

    exact: Any
    lossy: Any


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Quality, attention's error by block, and how the errors of keys and values are made up."""
    session = drift.session_of(config, folder)
    transforms = Pair(kvjax.cache(), transform_of(config))
    with Metrics(folder) as metrics:
        scores, errors = score(session, transforms, config, metrics)
    return {
        "scale": evaluate.scale(config, session) | {"regime": config.regime},
        "quality": evaluate.quality(scores, config),
        "blocks": drift.block_means(scores, config.block),
        "errors": {name: keys.split(error) for name, error in errors.items()},
    }


def score(
    session: Session, transforms: Pair, config: ConfigDict, metrics: Metrics
) -> tuple[dict[str, np.ndarray], dict[str, keys.TokenErrors]]:
    """Scores [B, S] by position, and the errors of every stored token by stream."""
    batch = len(session.tokens)
    caches = [kvjax.init_cache(session.model, t, batch, session.capacity) for t in transforms]
    layers = [Pair(*both) for both in zip(*(cache.layers for cache in caches), strict=True)]
    parts: list[dict[str, np.ndarray]] = []
    errors: list[dict[str, keys.TokenErrors]] = []
    bar = tqdm(list(session.blocks()), unit="block", leave=False, disable=None)
    for start, tokens in bar:
        hidden, layers, attention, made = _block(
            session.model, tokens, start, layers, transforms, config
        )
        target = session.tokens[:, start + 1 : start + 1 + session.block]
        found = evaluate.compare(*(unembed(session.model, x) for x in hidden), target)
        parts.append(jax.device_get(found | attention))
        errors += made
        means = {name: float(value.mean()) for name, value in parts[-1].items()}
        metrics.write(start + session.block, means)
    scores = {k: np.concatenate([part[k] for part in parts], 1) for k in parts[0]}
    return {k: v.astype(np.float64) for k, v in scores.items()}, keys.gather(errors)


def _block(
    model: Any, tokens: Array, start: int, layers: list[Pair], transforms: Pair, config: ConfigDict
) -> tuple[Pair, list[Pair], dict[str, Array], list[dict[str, keys.TokenErrors]]]:
    """One block of tokens through all layers of both streams.

    Returns the hidden states after the last norm, the layers' caches, attention's errors [B, T]
    averaged over layers, and the errors of the tile that the block has become in every layer.
    """
    batch, count = tokens.shape
    begin, length = jnp.full(batch, start, jnp.int32), jnp.full(batch, count, jnp.int32)
    weight = model.embed_tokens.weight[...]
    x = weight[tokens] * jnp.asarray(model.config.embed_scale, weight.dtype)
    streams, after, found, made = Pair(x, jnp.copy(x)), [], [], []
    static = config.regime == "static"
    stores = start >= config.cache.sink
    for block, layer in zip(model.layers, layers, strict=True):
        graph, state = nnx.split(block)
        streams, layer, error, token_errors = _layer(
            graph, transforms.lossy.attend, transforms.lossy.append, static, stores,
            state, streams, begin, length, layer,
        )  # fmt: skip
        after.append(layer)
        found.append(error)
        made.append(jax.device_get(token_errors))
    hidden = Pair(*(_norm(model.norm, x) for x in streams))
    mean = {name: sum(e[name] for e in found) / len(found) for name in found[0]}
    return hidden, after, mean, [keys.stacked(made)] if stores else []


@jax.jit
def _norm(norm: nnx.Module, x: Array) -> Array:
    return norm(x)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=9)
def _layer(
    graph: nnx.GraphDef,
    attend: Callable,
    append: Callable,
    static: bool,
    stores: bool,
    state: nnx.State,
    streams: Pair,
    start: Array,
    length: Array,
    layers: Pair,
) -> tuple[Pair, Pair, dict[str, Array], dict[str, keys.TokenErrors]]:
    """Both streams through one layer; rows one after another, as a CPU likes long chunks."""
    block = nnx.merge(graph, state)

    def one(row: tuple) -> Any:
        streams, start, length, layers = jax.tree.map(lambda leaf: leaf[None], row)
        chunks = [block.chunk(x, start, length) for x in streams]
        parts = [attend(*both) for both in _readers(layers, chunks)]
        combined = Pair(*(block.combine(x, p.out) for x, p in zip(streams, parts, strict=True)))
        own = [chunk._replace(inverse_frequencies=None) for chunk in chunks]
        lse = [part.lse for part in parts]
        found = combined, own, lse, attention_error(*(part.out for part in parts))
        return jax.tree.map(lambda leaf: leaf[0], found)

    streams, chunks, lse, error = jax.lax.map(one, (streams, start, length, layers))
    turn = block.self_attn.inverse_frequencies()
    chunks = [chunk._replace(inverse_frequencies=turn) for chunk in chunks]
    stored = chunks[0] if static else chunks[1]
    after = Pair(append(layers.exact, chunks[0], lse[0]), append(layers.lossy, stored, lse[1]))
    return streams, after, error, keys.of_tile(after.lossy, stored) if stores else {}


def _readers(layers: Pair, chunks: list[Chunk]) -> Iterator[tuple[LayerCache, Array, Chunk]]:
    for layer, chunk in zip(layers, chunks, strict=True):
        yield layer, chunk.query, chunk


def attention_error(exact: Array, ours: Array) -> dict[str, Array]:
    """Errors [B, T] of attention outputs [B, T, H, D]: the mean absolute one, and ‖error‖/‖exact‖
    over all heads of a token."""
    difference = ours - exact
    size = jnp.sqrt(jnp.square(difference).sum((2, 3)) / jnp.square(exact).sum((2, 3)))
    return {"attention_mae": jnp.abs(difference).mean((2, 3)), "attention_relative": size}
