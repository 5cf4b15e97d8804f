"""The two forms of delta_scan by shape: times on this machine's CPUs, and TPU schedules.

    .venv/bin/python scripts/bench/delta_scan.py [--tokens=512] [--rounds=7]
    .venv/bin/python scripts/bench/delta_scan.py --estimator=PATH [--targets=v5e,v6e,v5p,tpu7x]

A JSON line for each shape. On CPUs: the best of `rounds` of both forms, taken in turn, in one
process, forward and with gradient.

With --estimator, nothing is run: PATH is a Python file with `measure(spec, target) -> dict`, which
compiles what "file.py:function" returns, (callable, shapes), for a chip ahead of time (libtpu) and
gives `us_est` from the compiler's final schedule, or `error`. A chunk of 64 tokens in the chunked
form stands beside 64 times one recurrent step, without the loop around the steps: that favours the
recurrent form. "Compiled schedule, not run."
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvjax.ops.delta_scan.api import delta_scan

CHUNK = 64
# batch, heads, V = K, gates a token and head, what the gates are of
SHAPES = [
    (1, 1, 8, 8, "row"), (8, 1, 8, 8, "row"), (1, 4, 8, 8, "row"), (1, 1, 16, 16, "row"),
    (1, 4, 32, 1, "row"), (1, 4, 64, 1, "row"), (1, 4, 128, 1, "row"), (1, 4, 128, 128, "key"),
]  # fmt: skip
FORMS = ("recurrent", "chunked")


def shapes(
    batch: int, heads: int, dim: int, gates: int, per: str, tokens: int
) -> list[tuple[int, ...]]:
    """Of state, query, key, value, decay and erase."""
    widths = (dim, dim, dim, gates, gates if per == "row" else 1)
    return [(batch, heads, dim, dim), *((batch, tokens, heads, width) for width in widths)]


def scan(form: str, per: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return lambda *given: delta_scan(*given, form=form, per=per)


def gradient(form: str, per: str) -> Callable[..., tuple[jax.Array, ...]]:
    def loss(*given: jax.Array) -> jax.Array:
        reads, state = delta_scan(*given, form=form, per=per)
        return reads.sum() + state.sum()

    return jax.grad(loss, range(6))


def on_cpu(tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        rng = np.random.default_rng(0)
        given = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes(*shape, tokens)]
        given[2] /= jnp.linalg.norm(given[2], axis=-1, keepdims=True)
        given[4:] = [-jnp.abs(given[4]), jax.nn.sigmoid(given[5])]
        row = _named(shape) | {"target": "cpu", "tokens": tokens}
        for name, make in (("forward", scan), ("gradient", gradient)):
            times = _in_turn([jax.jit(make(form, shape[4])) for form in FORMS], given, rounds)
            row |= {f"{form}_{name}_ms": round(1e3 * t, 3)
                    for form, t in zip(FORMS, times, strict=True)}  # fmt: skip
        yield row


def _in_turn(functions: list[Callable[..., Any]], given: list[Any], rounds: int) -> list[float]:
    best = [float("inf")] * len(functions)
    for at in range(rounds + 1):  # the first compiles
        for i, function in enumerate(functions):
            start = time.perf_counter()
            jax.block_until_ready(function(*given))
            best[i] = min(best[i], time.perf_counter() - start) if at else best[i]
    return best


def _named(shape: tuple[int, int, int, int, str]) -> dict[str, Any]:
    return dict(zip(("batch", "heads", "dim", "gates", "per"), shape, strict=True))


# ---- schedules: the estimator calls these by name in a process of its own ----------------------


def _case(index: int, tokens: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    shape = SHAPES[index]
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes(*shape, tokens)]
    return scan("chunked", shape[4]), given  # of one token: one step


for _i in range(len(SHAPES)):
    globals()[f"step_{_i}"] = lambda i=_i: _case(i, 1)
    globals()[f"chunk_{_i}"] = lambda i=_i: _case(i, CHUNK)


def schedules(path: str, targets: list[str]) -> Iterator[dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("estimator", path)
    assert spec is not None and spec.loader is not None
    estimator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(estimator)
    for target in targets:
        for i, shape in enumerate(SHAPES):
            row = _named(shape) | {"target": target, "tokens": CHUNK}
            row["note"] = "compiled schedule, not run"
            found = {k: estimator.measure(f"{__file__}:{k}_{i}", target) for k in ("step", "chunk")}
            errors = {k: r["error"] for k, r in found.items() if "error" in r}
            if errors:
                yield row | {"error": errors}
                continue
            recurrent, chunked = CHUNK * found["step"]["us_est"], found["chunk"]["us_est"]
            row |= {"recurrent_us": round(recurrent, 2), "chunked_us": round(chunked, 2)}
            yield row | {"chunked_is_faster": round(recurrent / chunked, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--estimator")
    parser.add_argument("--targets", default="v5e,v6e,v5p,tpu7x")
    options = parser.parse_args()
    failed = False
    lines = (
        schedules(options.estimator, options.targets.split(","))
        if options.estimator
        else on_cpu(options.tokens, options.rounds)
    )
    for line in lines:
        failed |= "error" in line
        print(json.dumps(line), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
