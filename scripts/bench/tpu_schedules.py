"""Decode attention on TPUs as the compiler schedules it: a Markdown table and JSON. Nothing is run.

    .venv/bin/python scripts/bench/tpu_schedules.py --estimator PATH [--targets v5e,v6e] \
        [--out results/aot/decode_attention]

`--estimator` is a Python file with `measure(spec, target, env) -> dict`: it compiles what
``spec``, "file.py:case", returns for a chip ahead of time (libtpu), executes the compiler's final
schedule, and answers with `us_issue` (bundles over the clock), `us_hbm` (bytes over the public
bandwidth), `us_est` (the larger) and `hlos`, each with the use of its slots. Ratios of one target
are good to some 15–20 %, microseconds are optimistic.

Batch 8, 32 query heads, 8 KV heads, head_dim 128, tiles of 128, over the arrays that `append`
writes, float16 metadata. Ratios are against XLA's attention over a dense bfloat16 cache, estimated
in the same run. Lines come out as they are made; a line that is there is not made again unless it
failed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvjax.encode.base import Encoder
from kvjax.encode.heed import heed
from kvjax.encode.kvarn import kvarn
from kvjax.ops.dense_decode_attention.api import dense_decode_attention
from kvjax.ops.partials import Scoring, merge
from kvjax.ops.quantized_decode_attention.api import quantized_decode_attention, tpu_walk

ROOT = Path(__file__).resolve().parents[2]
BATCH, HEADS, KV_HEADS, DIM, TILE, SINKS = 8, 32, 8, 128, 128, 128
SCORING = Scoring(DIM**-0.5)
BANDWIDTH = {"v5e": 819e9, "v6e": 1640e9, "v5p": 2765e9, "tpu7x": 3690e9}  # bytes/s of a device
NAMES = {
    "dense": "XLA, dense bfloat16 cache",
    "single2": "ours, 2 bits, single-scaled",
    "dual2": "ours, 2 bits, dual-scaled (KVarN)",
    "single4": "ours, 4 bits, single-scaled",
    "single8": "ours, 8 bits, single-scaled",
    "whole2": "ours, 2 bits, with 128 sinks and half a recent tile",
    "exact": "ours, dense_decode_attention, bfloat16",
    "paged16": "paged_attention, bfloat16, 16 pages a block",
    "paged64": "paged_attention, bfloat16, 64 pages a block",
    "paged16int8": "paged_attention, int8, 16 pages a block",
    "paged64int8": "paged_attention, int8, 64 pages a block",
    "ragged16": "ragged_paged_attention, bfloat16, 16 pages a block",
    "ragged64": "ragged_paged_attention, bfloat16, 64 pages a block",
}
PAGE = 64
TARGET = os.environ.get("KVJAX_TARGET", "")  # in the estimator's process
Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def shaped(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def case() -> Case:
    """What the estimator compiles, named by the environment: it runs in a process of its own."""
    name, size = os.environ["KVJAX_CASE"], int(os.environ["KVJAX_SIZE"])
    kind = name.removesuffix("int8").rstrip("0123456789")
    makers = {
        "dense": dense, "single": body, "dual": body, "whole": body, "exact": exact,
        "paged": paged, "ragged": ragged,
    }  # fmt: skip
    function, arguments, scalars = makers[kind](name, size)
    options = {"smem_values": scalars, "kv_tokens": BATCH * KV_HEADS * size}
    return function, arguments, options


def entries(size: int) -> jax.ShapeDtypeStruct:
    return shaped(BATCH, KV_HEADS, size, DIM)


def dense(_: str, size: int) -> Case:
    def attend(query: Any, key: Any, value: Any) -> Any:
        grouped = query.reshape(BATCH, KV_HEADS, HEADS // KV_HEADS, DIM)
        exact = dict(preferred_element_type=jnp.float32)
        scores = jnp.einsum("bkgd,bksd->bkgs", grouped, key, **exact) * SCORING.scale
        p = jax.nn.softmax(scores, -1).astype(jnp.bfloat16)
        return jnp.einsum("bkgs,bksd->bkgd", p, value, **exact)

    return attend, (shaped(BATCH, HEADS, DIM), entries(size), entries(size)), {}


def exact(_: str, size: int) -> Case:
    def attend(*arguments: Any) -> Any:
        return dense_decode_attention(*arguments, scoring=SCORING, implementation="tpu")

    arguments = (shaped(BATCH, 1, HEADS, DIM), entries(size), entries(size))
    return attend, (*arguments, shaped(BATCH, dtype="int32")), {"0": np.full(BATCH, size)}


def encoder(name: str) -> Encoder:
    """The encoder whose tiles a row reads."""
    bits = int(name[-1])
    return (kvarn if name.startswith("dual") else heed)(key_bits=bits, value_bits=bits)


def body(name: str, size: int) -> Case:
    """Packed tiles; "whole": merged with exact sinks and a recent tile that is half full."""
    format = encoder(name).affine()
    tiles = shaped(BATCH, KV_HEADS, size // TILE, TILE, DIM)
    key, value = (
        jax.eval_shape(lambda x, role=role: encoder(name).encode_tile(x, role), tiles)
        for role in ("key", "value")
    )

    def attend(query: Any, key: Any, value: Any, made: Any, *others: Any) -> Any:
        found = quantized_decode_attention(
            query, made[:, None], key, value, made, format=format, scoring=SCORING,
            implementation="tpu",
        )  # fmt: skip
        for i in range(0, len(others), 2):
            length = jnp.full_like(made, (SINKS, TILE // 2)[i // 2])
            part = dense_decode_attention(
                query, *others[i : i + 2], length, scoring=SCORING, implementation="tpu"
            )
            found = merge(found, part)
        return found

    query = shaped(BATCH, 1, HEADS, DIM)
    others = [entries(SINKS)] * 2 + [entries(TILE)] * 2 if name.startswith("whole") else []
    blocks = tpu_walk(query, key, format, 2 if TARGET == "v5p" else 1)
    steps = -(-size // TILE // blocks.tiles)
    items = steps * BATCH * KV_HEADS // blocks.heads // blocks.programs
    scalars = {"0": np.full(BATCH, size), "1": np.zeros(BATCH, int), "2": np.full(BATCH, steps),
               "3": np.full(blocks.programs, items)}  # fmt: skip
    return attend, (query, key, value, shaped(BATCH, dtype="int32"), *others), scalars


def paged(name: str, size: int) -> Case:
    from jax.experimental.pallas.ops.tpu import paged_attention as peer
    from jax.experimental.pallas.ops.tpu.paged_attention import quantization_utils as quantized

    number = name.removeprefix("paged").removesuffix("int8")
    pages = size // PAGE
    block = min(int(number), pages)
    cache = shaped(KV_HEADS, BATCH * pages, PAGE, DIM)
    if name.endswith("int8"):
        scales = shaped(*cache.shape[:3], 1, dtype="float32")
        cache = quantized.QuantizedTensor(shaped(*cache.shape, dtype="int8"), scales)

    def attend(*arguments: Any) -> Any:
        return peer.paged_attention(
            *arguments, pages_per_compute_block=block,
            megacore_mode="kv_head" if TARGET == "v5p" else None,
        )  # fmt: skip

    index = shaped(BATCH, pages, dtype="int32")
    arguments = (shaped(BATCH, HEADS, DIM), cache, cache, shaped(BATCH, dtype="int32"), index)
    return attend, arguments, {"0": np.full(BATCH, size), "1": np.arange(BATCH * pages)}


def ragged(name: str, size: int) -> Case:
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as peer

    pages, block = size // PAGE, int(name.removeprefix("ragged"))

    def attend(*arguments: Any) -> Any:
        return peer.ragged_paged_attention(
            *arguments, sm_scale=SCORING.scale, num_kv_pages_per_block=min(block, pages),
            num_queries_per_block=8, vmem_limit_bytes=60 * 2**20,
        )  # fmt: skip

    cache = shaped(BATCH * pages, PAGE, 2 * KV_HEADS, DIM)
    integers = [shaped(*s, dtype="int32") for s in ((BATCH,), (BATCH, pages), (BATCH + 1,), (1,))]
    values = [np.full(BATCH, size), np.arange(BATCH * pages), np.arange(BATCH + 1),
              np.zeros(2, int), np.array([BATCH])]  # fmt: skip
    scalars = {str(i): value for i, value in enumerate(values)}
    return attend, (shaped(BATCH, HEADS, DIM), cache, *integers), scalars


def bound_us(name: str, size: int, target: str) -> float:
    """The time of what must be read: codes and metadata as `Affine.tile_bytes` counts them, exact
    entries that are valid."""
    entry = 4 * DIM * BATCH * KV_HEADS  # bfloat16, key and value
    if name in ("dense", "exact") or name.startswith("ragged"):
        total = size * entry
    elif name.startswith("paged"):
        total = size * (entry // 2 + 8 * BATCH * KV_HEADS if "int8" in name else entry)
    else:
        tile = sum(encoder(name).tile_bytes(role, DIM) for role in ("key", "value"))
        total = tile * BATCH * KV_HEADS * size // TILE
        total += entry * (SINKS + TILE // 2) if name.startswith("whole") else 0
    return total / BANDWIDTH[target] * 1e6


def record(measure: Callable[..., Any], name: str, size: int, target: str) -> dict[str, Any]:
    spec = f"{Path(__file__).resolve()}:case"
    environment = {"KVJAX_CASE": name, "KVJAX_SIZE": str(size), "KVJAX_TARGET": target}
    found = measure(spec, target, environment, timeout=1800)
    head = {"target": target, "size": size, "case": name, "note": "compiled schedule, not run"}
    if "error" in found:
        return head | {"error": " ".join(found["error"])[:300].replace(str(ROOT), ".")}
    longest = max(found["hlos"], key=lambda h: h["cycles"] * h["calls"])
    busy = {unit: slots["util"] for unit, slots in longest["slots"].items()}
    limit = "HBM" if found["bound"] == "hbm" else "issue"
    kept = {k: found[k] for k in ("us_issue", "us_hbm", "us_est", "us_sim", "cycles")}
    kept |= {"temporary_bytes": found["memory"]["temp_size_in_bytes"]}
    warnings = [h["warnings"] for h in found["hlos"] if h.get("warnings")]
    bound = round(bound_us(name, size, target), 2)
    return head | kept | {"us_bound": bound, "limit": limit, "slots": busy, "warnings": warnings}


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: microseconds, the ratio to XLA's dense attention, and what limits, by target."""
    found = {(r["target"], r["size"], r["case"]): r for r in records if "error" not in r}
    text = ["# Decode attention on TPUs: compiled schedule, not run", ""]
    text += [COMMAND, ""]
    for size in sorted({size for _, size, _ in found}):
        targets = [t for t in BANDWIDTH if (t, size, "dense") in found]
        text += [f"## {size} tokens", "", "| | " + " | ".join(targets) + " |"]
        text.append("|---" * (len(targets) + 1) + "|")
        for name, label in NAMES.items():
            cells = [_cell(found.get((t, size, name)), found[t, size, "dense"]) for t in targets]
            if any(cells):
                text.append(f"| {label} | " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text) + "\n"


COMMAND = """`scripts/bench/tpu_schedules.py`: batch 8, 32 query heads, 8 KV heads, head_dim 128,
tiles of 128, float16 metadata. A cell has estimated microseconds, the ratio to XLA's attention over
a dense bfloat16 cache in the same run, and what limits: HBM, with the share of the byte bound that
is reached, or the issue of instructions, with the use of the matrix and vector units. tpu7x: one
core of a chip's two; v5p: both."""
UNITS = {"MATMUL": "MXU", "XLU": "VALU"}  # the estimator's names are off by a column


def _cell(found: dict[str, Any] | None, dense: dict[str, Any]) -> str:
    if found is None:
        return ""
    limit = f"HBM, {100 * found['us_bound'] / found['us_est']:.0f} % of bound"
    if found["limit"] == "issue":
        limit = ", ".join(f"{unit} {found['slots'].get(slot, 0):.0%}"
                          for slot, unit in UNITS.items())  # fmt: skip
    ratio = dense["us_est"] / found["us_est"]
    return f"{found['us_est']:.1f} · {ratio:.2f}× · {limit}"


_ESTIMATOR = flags.DEFINE_string("estimator", None, "a Python file, see above", required=True)
_TARGETS = flags.DEFINE_list("targets", list(BANDWIDTH), "chips")
_CASES = flags.DEFINE_list("cases", list(NAMES), "rows")
_SIZES = flags.DEFINE_list("sizes", ["4096", "32768"], "tokens")
_OUT = flags.DEFINE_string("out", "results/aot/decode_attention", "two files: .jsonl and .md")


def main(_: list[str]) -> None:
    spec = importlib.util.spec_from_file_location("estimator", _ESTIMATOR.value)
    assert spec is not None and spec.loader is not None
    estimator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(estimator)
    path = Path(_OUT.value).with_suffix(".jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    records = [r for r in records if "error" not in r]
    done = {(r["target"], r["size"], r["case"]) for r in records}
    for name in _CASES.value:
        for size in map(int, _SIZES.value):
            for target in _TARGETS.value:
                if (target, size, name) in done:
                    continue
                records.append(record(estimator.measure, name, size, target))
                path.write_text("".join(json.dumps(r) + "\n" for r in records))
                print(json.dumps(records[-1])[:300], flush=True)
    Path(_OUT.value).with_suffix(".md").write_text(table(records))


if __name__ == "__main__":
    app.run(main)
