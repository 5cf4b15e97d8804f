"""Whole sequences chunk by chunk, and the gradient from the states at which the chunks start.

The forward pass keeps one state a chunk; the backward pass walks the chunks from the last to the
first and runs each again from its own. Memory grows with T / C states instead of T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.ops.delta_scan import tpu
from kvjax.ops.delta_scan.chunked import chunk as chunk_at_once
from kvjax.ops.delta_scan.reference import Rule, Tokens, recurrent

FORMS: dict[str, Callable[[Rule, Array, Tokens], tuple[Array, Array]]] = {
    "recurrent": recurrent,
    "chunked": chunk_at_once,
}


@dataclass(frozen=True)
class Walk:
    """How a scan runs: its rule, the form of a chunk, the tokens of one, and whether the TPU
    kernel takes the forward pass."""

    rule: Rule
    form: str
    size: int
    kernel: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan(walk: Walk, state: Array, tokens: Tokens) -> tuple[Array, Array]:
    """The final state [B,H,V,K] and the reads [T,B,H,V]."""
    if walk.kernel:
        return tpu.scan(walk.rule, state, tokens)[:2]
    if walk.form == "recurrent":
        return recurrent(walk.rule, state, tokens)
    return _forward(walk, state, tokens)[:2]


def _forward(walk: Walk, state: Array, tokens: Tokens) -> tuple[Array, Array, Array]:
    """As `scan`, and the states [N,B,H,V,K] at which the chunks start."""
    if walk.kernel:
        return tpu.scan(walk.rule, state, tokens, walk.size)
    form = FORMS[walk.form]

    def one(state: Array, part: Tokens) -> tuple[Array, tuple[Array, Array]]:
        after, reads = form(walk.rule, state, part)
        return after, (state, reads)

    final, (starts, reads) = lax.scan(one, state, _split(walk.size, tokens))
    return final, _joined(reads, tokens.query.shape[0]), starts


def _split(size: int, tokens: Tokens) -> Tokens:
    """[T,...] -> [N,C,...]; tokens of zeros at the end write nothing, forget nothing."""
    total = tokens.query.shape[0]
    count = -(-total // size)

    def part(x: Array) -> Array:
        padded = jnp.pad(x, [(0, count * size - total)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(count, size, *x.shape[1:])

    return jax.tree.map(part, tokens)


def _joined(x: Array, total: int) -> Array:
    """[N,C,...] -> [T,...]."""
    return x.reshape(-1, *x.shape[2:])[:total]


def _remember(walk: Walk, state: Array, tokens: Tokens) -> tuple:
    final, reads, starts = _forward(walk, state, tokens)
    return (final, reads), (starts, tokens)


def _backward(walk: Walk, kept: tuple, wanted: tuple) -> tuple[Array, Tokens]:
    (starts, tokens), (of_state, of_reads) = kept, wanted
    form, size = FORMS[walk.form], walk.size

    def one(of_state: Array, part: tuple) -> tuple[Array, Tokens]:
        start, tokens, of_reads = part
        pull = jax.vjp(functools.partial(form, walk.rule), start, tokens)[1]
        return pull((of_state, of_reads))

    of_parts = _split(size, Tokens(*[of_reads] * 5)).query
    parts = (starts, _split(size, tokens), of_parts)
    of_start, of_tokens = lax.scan(one, of_state, parts, reverse=True)
    total = tokens.query.shape[0]
    return of_start, jax.tree.map(lambda x: _joined(x, total), of_tokens)


scan.defvjp(_remember, _backward)
