"""Decode speed: the row's cache and the exact cache, by turns, in the same process."""

import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.head_to_head.session import Session
from kvjax.models.decoder import Decoder
from kvjax.models.generate import decode_stretch

REPEATS = 2


def decode_rates(session: Session, model: Decoder, cache: Any, count: int) -> dict[str, Any]:
    """Tokens per second over all rows, greedy, after the text; the best of two, taken by turns.

    `model` is the one that `cache` belongs to.
    """
    sides = {"ours": (model, cache), "exact": (session.model, session.exact_cache)}
    for side in sides.values():
        _seconds(session, *side, count)  # compiles
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(REPEATS):
        for name, side in sides.items():
            times[name].append(_seconds(session, *side, count))
    tokens = len(session.tokens) * count
    ours, exact = tokens / min(times["ours"]), tokens / min(times["exact"])
    return {
        "tokens_per_second": ours,
        "exact_tokens_per_second": exact,
        "ratio": ours / exact,
        "tokens": tokens,
        "batch": len(session.tokens),
        "repeats": REPEATS,
    }


def _seconds(session: Session, model: Decoder, cache: Any, count: int) -> float:
    """Time of one compiled stretch from `cache`, copied first because the stretch donates it."""
    graph, state = nnx.split(model)
    token = session.tokens[:, session.length]
    logits = jax.nn.one_hot(token, model.config.vocab_size)  # so the text's token is next
    done = jnp.zeros(len(token), bool)
    fresh = jax.block_until_ready(jax.tree.map(jnp.copy, cache))
    start = time.perf_counter()
    out = decode_stretch(
        graph, state, fresh, logits, jax.random.key(0), done, jnp.int32(count), steps=count
    )
    jax.block_until_ready(out)
    return time.perf_counter() - start
