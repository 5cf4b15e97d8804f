"""What both scripts/aot_tpu.py and scripts/aot_h100.py compile, and how they name it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.ops.delta_scan.api import delta_scan


class Program(NamedTuple):
    """What is compiled: `shape` names it in the output."""

    op: str
    shape: dict[str, Any]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def query(batch: int, tokens: int, heads: int, dim: int) -> Any:
    return jax.ShapeDtypeStruct((batch, tokens, heads, dim), jnp.bfloat16)


def length(batch: int) -> Any:
    return jax.ShapeDtypeStruct((batch,), jnp.int32)


def delta_scans(everything: bool, memory: dict[str, Any]) -> Iterator[Program]:
    """A memory's prefill chunk, also with its gradient, as `memory` says; a Gated DeltaNet layer's
    and a Kimi Delta Attention layer's by the chunked form."""

    def scan(*given: Any, **options: Any) -> Any:
        return delta_scan(*given, **options)

    def trained(*given: Any, **options: Any) -> Any:
        def loss(*given: Any) -> Any:
            return sum(x.sum() for x in delta_scan(*given, **options))

        return jax.grad(loss, range(len(given)))(*given)

    layer = {"form": "chunked", "read": "after"}
    cases: list[tuple[Callable[..., Any], tuple[int, ...], str, dict[str, Any]]] = [
        (scan, (8, 512, 1, 8, 8), "row", memory),
        (trained, (8, 512, 1, 8, 8), "row", memory),
        (scan, (1, 512, 4, 128, 1), "row", layer),
        (scan, (1, 512, 4, 128, 128), "key", layer),
    ]
    if everything:
        cases += [(scan, (b, 512, 4, 16, g), "row", memory) for b in (1, 64) for g in (1, 16)]
    for run, (batch, tokens, heads, dim, gates), per, options in cases:
        shape = dict(batch=batch, tokens=tokens, heads=heads, dim=dim, gates=gates, per=per)
        shape |= options | {"gradient": run is trained}
        widths = (dim, dim, dim, gates, gates if per == "row" else 1)
        given = [(batch, heads, dim, dim), *((batch, tokens, heads, n) for n in widths)]
        arguments = tuple(jax.ShapeDtypeStruct(x, jnp.float32) for x in given)
        yield Program("delta_scan", shape, functools.partial(run, per=per, **options), arguments)
