"""Reads a compiled decoding program for copies as large as the cache."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from kvjax.models.generate import decode_stretch

_LINE = re.compile(r"= (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")


class Found(NamedTuple):
    copies: list[str]
    updates: int


def copies_in(program: str, elements: int) -> list[str]:
    """Copies, transposes and concatenations of at least `elements` elements."""
    return [line for line, kind in _large(program, elements)
            if kind in ("copy", "transpose", "concatenate", "copy-start")]  # fmt: skip


def _large(program: str, elements: int) -> list[tuple[str, str]]:
    found = []
    for line in program.splitlines():
        match = _LINE.search(line)
        if match and np.prod([int(n) for n in match[2].split(",") if n] or [1]) >= elements:
            found.append((line.strip()[:160], match[3]))
    return found


def cache_sized(model, transform, batch: int, capacity: int) -> Found:
    """What a stretch of decoding does to arrays as large as a layer's largest cache array."""
    cache = kvjax.init_cache(model, transform, batch, capacity)
    graph, state = nnx.split(model)
    logits = jnp.zeros((batch, model.config.vocab_size))
    key, done = jax.random.key(0), jnp.zeros(batch, bool)
    lowered = decode_stretch.lower(graph, state, cache, logits, key, done, jnp.int32(4))
    program = lowered.compile().as_text()
    largest = max(x.size for x in jax.tree.leaves(cache.layers[0]))
    writes = [k for _, k in _large(program, largest) if k in ("scatter", "dynamic-update-slice")]
    return Found(copies_in(program, largest), len(writes))
