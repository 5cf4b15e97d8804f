"""Few-bit caches on a real GPU (Hopper): are the kernels right, how fast? At most five minutes.

    .venv/bin/python scripts/device/quantize.py [--output=results/device/quantize.json]
    .venv/bin/python scripts/device/quantize.py --dry_run   # anywhere: tiny, its times mean nothing

First every kernel against its definition; then, at Qwen3-4B's shape (32 query heads, 8 KV heads,
head_dim 128), the time of one decoding step's attention over 4K, 32K and 128K tokens at batch 1
and 8: exact (bfloat16) and in 2, 4 and 8 bits, beside the attention functions that JAX offers
(cuDNN's, XLA's, and Pallas' Triton kernel where it can be imported), and a copy as the ceiling.
Last, the time to encode a tile of every KV head, beside the reference compiled by XLA.

A time is the median of several runs of a loop inside one program, each turn of which waits for
the one before. `GB/s` counts the cache's bytes once; the copy's counts bytes read and written.
Caches under the size of the L2 cache may be read from there: such rows are marked. Everything is
written to the output as JSON; what failed or was left out for want of time says so.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvjax.ops import hadamard, packing
from kvjax.ops.affine import Affine
from kvjax.ops.dense_decode_attention import gpu as dense
from kvjax.ops.encode_tile import gpu as encode
from kvjax.ops.encode_tile import heed, reference
from kvjax.ops.encode_tile.heed import Heed
from kvjax.ops.encode_tile.reference import Kvarn
from kvjax.ops.gpu_blocks import dense_blocks, packed_blocks
from kvjax.ops.mosaic_gpu import device_refusal
from kvjax.ops.partials import Block, Partial, Scoring, Visible, read
from kvjax.ops.quantized_decode_attention import gpu as packed

ROOT = Path(__file__).parents[2]

_OUTPUT = flags.DEFINE_string(
    "output", None, "JSON file; results/device/quantize.json, or none of a dry run"
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "tiny shapes under the interpreter, on any machine")
_SECONDS = flags.DEFINE_float("seconds", 270, "no measurement begins after so many")
_CONTEXTS = flags.DEFINE_list("contexts", ["131072", "32768", "4096"], "tokens in the cache")
_BATCHES = flags.DEFINE_list("batches", ["1", "8"], "rows")

TILE, L2_BYTES = 128, 50 * 2**20
TOLERANCE = {"exact": 1e-2, "packed": 2e-3}  # largest error over the largest output
ENCODED = 0.02  # how far the power of an encoder's error may be from the definition's
ENCODERS = [(name, role) for name in ("kvarn", "heed") for role in ("value", "key")]
WIDTHS = {"2 bits": (2, False), "2 bits, two scales": (2, True), "4 bits": (4, False),
          "8 bits": (8, False)}  # fmt: skip
Tree = Any


class Sizes:
    """The shapes of this run."""

    def __init__(self, tiny: bool) -> None:
        self.heads, self.kv_heads, self.dim = (4, 2, 64) if tiny else (32, 8, 128)
        self.contexts = [256] if tiny else [int(n) for n in _CONTEXTS.value]
        self.batches = [1] if tiny else [int(n) for n in _BATCHES.value]
        self.tokens = (1,) if tiny else (1, 4)
        self.repeats, self.loop_seconds = (1, 0.0) if tiny else (7, 0.01)
        self.widths = dict(list(WIDTHS.items())[: 1 if tiny else None])
        self.encoders = ENCODERS[: 1 if tiny else None]
        self.interpret: Any = plgpu.InterpretGPUParams() if tiny else False
        self.cores = 4 if tiny else jax.devices()[0].core_count
        self.scoring = Scoring(self.dim**-0.5)


def packed_cache(sizes: Sizes, batch: int, size: int, bits: int, column: bool) -> tuple[Tree, Tree]:
    """Random tiles; any codes under scales of the usual size make a cache."""
    lead, dim = (batch, sizes.kv_heads, size // TILE), sizes.dim

    def tile(key: jax.Array, rows: int, minor: int) -> Tree:
        keys = jax.random.split(key, 4)
        shape = (*lead, packing.words(rows, bits), minor)
        codes = lax.bitcast_convert_type(jax.random.bits(keys[0], shape), jnp.int32)
        scale = jax.random.uniform(keys[1], (*lead, rows), minval=0.5, maxval=2.0) * 2.0**-bits
        zero = jax.random.normal(keys[2], (*lead, rows)) * 0.2 - 0.6
        made = {"codes": codes, "affine": packing.pack_pair(scale, zero, "float16")}
        if column:
            factor = jax.random.uniform(keys[3], (*lead, minor), minval=0.5, maxval=1.5)
            made["column"] = packing.pack_halves(factor, "float16")
        return made

    key, value = jax.random.split(jax.random.key(bits))
    make = jax.jit(lambda: (tile(key, dim, TILE), tile(value, TILE, dim)))
    return jax.block_until_ready(make())


def exact_cache(sizes: Sizes, batch: int, size: int) -> tuple[jax.Array, jax.Array]:
    shape = (batch, sizes.kv_heads, size, sizes.dim)
    keys = jax.random.split(jax.random.key(1))
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)


def query_of(sizes: Sizes, batch: int, tokens: int) -> jax.Array:
    shape = (batch, tokens, sizes.heads, sizes.dim)
    return jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)


def run_exact(sizes: Sizes, query: Any, key: Any, value: Any, length: Any) -> Partial:
    blocks = dense_blocks(key.shape[0], key.shape[1], key.shape[2], sizes.cores)
    return dense.attention(
        query, key, value, length, None, scoring=sizes.scoring, blocks=blocks,
        interpret=sizes.interpret,
    )  # fmt: skip


def run_packed(
    sizes: Sizes, format: Affine, query: Any, key: Tree, value: Tree, length: Any
) -> Partial:
    blocks = packed_blocks(*key["codes"].shape[:3], sizes.cores)
    return packed.attention(
        query, key, value, length, None, format=format, scoring=sizes.scoring, blocks=blocks,
        interpret=sizes.interpret,
    )  # fmt: skip


def definition(
    sizes: Sizes, query: jax.Array, key: jax.Array, value: jax.Array, length: jax.Array
) -> Partial:
    """key, value: float32 [B,K,S,D]."""
    with jax.default_matmul_precision("float32"):
        place = jnp.broadcast_to(jnp.arange(key.shape[2]), (len(length), key.shape[2]))
        block = Block(key, value, place, place < length[:, None])
        last = jnp.full(query.shape[:2], key.shape[2])
        wide, every = query.astype(jnp.float32), Visible(causal=True)
        return read(wide, last, lambda i: block, 1, sizes.scoring, every)


def errors(sizes: Sizes, tokens: int) -> list[dict[str, Any]]:
    """The error of every kernel, over ragged lengths."""
    size = 256 if _DRY_RUN.value else 2048
    batch = 1 if _DRY_RUN.value else 2
    length = jnp.array([size - 77, size][:batch], jnp.int32)
    query = query_of(sizes, batch, tokens)
    key, value = exact_cache(sizes, batch, size)
    wide = key.astype(jnp.float32), value.astype(jnp.float32)
    pairs = {"exact": (jax.jit(functools.partial(run_exact, sizes)), (key, value), wide)}
    for name, (bits, column) in sizes.widths.items():
        format = Affine(TILE, bits, bits, column, "float16")
        cache = packed_cache(sizes, batch, size, bits, column)
        flat = tuple(
            format.decode(x, role, sizes.dim).reshape(batch, sizes.kv_heads, size, sizes.dim)
            for x, role in zip(cache, ("key", "value"), strict=True)
        )
        pairs[name] = (jax.jit(functools.partial(run_packed, sizes, format)), cache, flat)
    found = []
    for name, (run, cache, flat) in pairs.items():
        want, got = definition(sizes, query, *flat, length), run(query, *cache, length)
        error = float(jnp.abs(got.out - want.out).max() / jnp.abs(want.out).max())
        lse = float(jnp.abs(got.lse - want.lse).max())
        limit = TOLERANCE["exact" if name == "exact" else "packed"]
        passed = error < limit and lse < limit
        found.append({"kernel": name, "tokens": tokens, "error": error, "lse_error": lse,
                      "passed": passed})  # fmt: skip
    return found


def to_encode(sizes: Sizes, batch: int) -> tuple[jax.Array, jax.Array]:
    """A tile of every KV head, its channels of unlike size, and the queries of its tokens."""
    lead, group = (batch, sizes.kv_heads, 1), sizes.heads // sizes.kv_heads
    keys = jax.random.split(jax.random.key(3), 3)
    size = jnp.exp(jax.random.normal(keys[0], (*lead, 1, sizes.dim)))
    x = jax.random.normal(keys[1], (*lead, TILE, sizes.dim)) * size
    query = jax.random.normal(keys[2], (*lead, group * TILE, sizes.dim))
    return x.astype(jnp.bfloat16), query.astype(jnp.bfloat16)


def encoders_of(sizes: Sizes, name: str, role: str) -> list[Callable[..., Tree]]:
    """The kernel and its definition, in 2 bits, of what `to_encode` gives."""
    if name == "kvarn":
        balanced = Kvarn(2)
        return [
            lambda x, query: encode.kvarn_tile(x, role, balanced, sizes.interpret),
            lambda x, query: reference.kvarn_tile(x, role, balanced),
        ]
    fitted = Heed(2)
    return [
        lambda x, query: encode.heed_tile(x, role, fitted, query, sizes.interpret),
        lambda x, query: heed.heed_tile(x, role, fitted, query),
    ]


def encoder_errors(sizes: Sizes) -> list[dict[str, Any]]:
    """How much more or less of a tile is lost than by the definition; single codes may differ."""
    x, query = to_encode(sizes, 1)
    turned, found = hadamard.rotate(x), []
    for name, role in sizes.encoders:
        format = Affine(TILE, 2, 2, name == "kvarn", "float16")
        lost = [
            jnp.square(format.decode(jax.jit(f)(x, query), role, sizes.dim) - turned).sum()
            for f in encoders_of(sizes, name, role)
        ]
        error = abs(float(lost[0] / lost[1]) - 1)
        found.append({"kernel": f"{name} {role}", "tokens": TILE, "error": error,
                      "passed": error < ENCODED})  # fmt: skip
    return found


def encoder_times(sizes: Sizes, batch: int, begun: float) -> list[dict[str, Any]]:
    """Seconds to encode a tile of every KV head, by the kernel and by XLA."""
    x, query = to_encode(sizes, batch)
    rows: list[dict[str, Any]] = []
    for name, role in sizes.encoders:
        row: dict[str, Any] = {"batch": batch, "kernel": f"{name} {role}"}
        for field, f in zip(("seconds", "xla"), encoders_of(sizes, name, role), strict=True):
            if time.perf_counter() - begun > _SECONDS.value:
                row[field] = None
                continue
            row[field] = seconds_of(sizes, functools.partial(_all_of, f), x, query)
        rows.append(row)
    return rows


def _all_of(run: Callable[..., Tree], x: jax.Array, query: jax.Array) -> jax.Array:
    return sum(leaf.sum() for leaf in jax.tree.leaves(run(x, query))).astype(jnp.float32)


def seconds_of(sizes: Sizes, attend: Callable[..., Any], query: jax.Array, *cache: Tree) -> float:
    """Seconds of one call, inside a loop long enough to hide its launch."""

    @jax.jit
    def loop(turns: Any, query: jax.Array, *cache: Tree) -> jax.Array:
        def turn(_: Any, query: jax.Array) -> jax.Array:
            out = attend(query, *cache)
            return query + (out * 1e-30).astype(query.dtype)

        return lax.fori_loop(0, turns, turn, query)

    def once(turns: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(jnp.int32(turns), query, *cache))
        return time.perf_counter() - start

    once(1)
    turns = max(1, min(1000, math.ceil(sizes.loop_seconds / once(1))))
    turns = max(1, min(1000, math.ceil(sizes.loop_seconds * turns / once(turns))))
    return statistics.median(once(turns) / turns for _ in range(sizes.repeats))


def copy_bandwidth(sizes: Sizes) -> float:
    """Bytes a second that a copy reads and writes."""
    x = jnp.zeros((2**12 if _DRY_RUN.value else 2**29,), jnp.float32)  # 2 GiB
    bump = functools.partial(_bump, x.shape[0])
    return 2 * x.nbytes / seconds_of(sizes, bump, x)


def _bump(size: int, x: jax.Array) -> jax.Array:
    return jnp.full((size,), 1e30, x.dtype)  # so that a turn of the loop reads x and writes x + 1


def peers(key: jax.Array, value: jax.Array) -> dict[str, tuple[Callable[..., Any], Tree]]:
    """What JAX offers, each with the cache in the order that it wants to find in memory."""
    tokens_first = [jax.jit(lambda x: x.swapaxes(1, 2))(x) for x in (key, value)]
    offered = jax.nn.dot_product_attention
    found = {"XLA, exact": (functools.partial(offered, implementation="xla"), tokens_first)}
    if _DRY_RUN.value:
        return found
    found["cuDNN, exact"] = functools.partial(offered, implementation="cudnn"), tokens_first
    try:
        from jax.experimental.pallas.ops.gpu.decode_attention import gqa
    except Exception as error:
        print(f"Pallas' decode attention is not there: {error}")
        return found

    def triton(query: Any, key: Any, value: Any) -> Any:
        return gqa(query[:, 0], key.swapaxes(1, 2), value.swapaxes(1, 2))[:, None]

    return found | {"Pallas Triton, exact": (triton, (key, value))}


def times(sizes: Sizes, batch: int, size: int, begun: float) -> list[dict[str, Any]]:
    """A row for every way to read a cache of `size` tokens a row."""
    query, length = query_of(sizes, batch, 1), jnp.full((batch,), size, jnp.int32)
    rows: list[dict[str, Any]] = []

    def measure(name: str, attend: Callable[..., Any], cache: Tree) -> None:
        row: dict[str, Any] = {"batch": batch, "tokens": size, "kernel": name}
        row["bytes"] = sum(x.nbytes for x in jax.tree.leaves(cache))
        if time.perf_counter() - begun > _SECONDS.value:
            rows.append(row | {"skipped": "no time left"})
            return
        try:
            seconds = seconds_of(sizes, attend, query, *cache)
            rows.append(row | {"seconds": seconds, "in_l2": row["bytes"] < L2_BYTES})
        except Exception as error:  # one that cannot run must not hide the others
            rows.append(row | {"failed": f"{type(error).__name__}: {error}"[:300]})

    cache = exact_cache(sizes, batch, size)
    measure("exact", lambda q, k, v: run_exact(sizes, q, k, v, length).out, cache)
    for name, (attend, theirs) in peers(*cache).items():
        measure(name, attend, theirs)
    del cache, theirs
    for name, (bits, column) in sizes.widths.items():
        format = Affine(TILE, bits, bits, column, "float16")
        cache = packed_cache(sizes, batch, size, bits, column)
        run = functools.partial(run_packed, sizes, format)
        measure(name, lambda q, k, v, run=run: run(q, k, v, length).out, cache)
        del cache
    return rows


def compared(rows: list[dict[str, Any]], ceiling: float) -> None:
    """Adds bandwidth, its share of a copy's, and the ratio to the fastest exact one measured."""
    exact = [row["seconds"] for row in rows if "exact" in row["kernel"] and "seconds" in row]
    for row in rows:
        if "seconds" in row:
            row["bandwidth"] = row["bytes"] / row["seconds"]
            row["share_of_copy"] = row["bandwidth"] / ceiling
            row["times_faster_than_exact"] = min(exact) / row["seconds"] if exact else None


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        head = [row["batch"], row["tokens"], row["kernel"], row["bytes"] / 2**20]
        if "seconds" not in row:
            lines.append([*head, row.get("skipped") or row["failed"][:40]])
            continue
        ratio = row["times_faster_than_exact"]
        share, where = f"{row['share_of_copy']:.0%}", "L2" if row["in_l2"] else ""
        lines.append([*head, row["seconds"] * 1e6, row["bandwidth"] / 1e9, share, where, ratio])
    header = ["batch", "tokens", "kernel", "MiB", "µs", "GB/s", "of copy", "", "× fastest exact"]
    return tabulate(lines, header, floatfmt=".4g")


def no_gpu() -> str:
    if jax.default_backend() != "gpu":
        return "there is no GPU here, or jax[cuda13] is not installed"
    return device_refusal()


def save(record: dict[str, Any]) -> None:
    if not _OUTPUT.value and _DRY_RUN.value:
        return
    path = Path(_OUTPUT.value or ROOT / "results/device/quantize.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; options start with --")
    if not _DRY_RUN.value and (lack := no_gpu()):
        raise SystemExit(f"{lack}; --dry_run goes through the script without one")
    begun, sizes = time.perf_counter(), Sizes(_DRY_RUN.value)
    device = jax.devices()[0]
    record: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__,
                              "dry_run": _DRY_RUN.value}  # fmt: skip
    record["correctness"] = [row for tokens in sizes.tokens for row in errors(sizes, tokens)]
    record["correctness"] += encoder_errors(sizes)
    print(tabulate(record["correctness"], "keys", floatfmt=".2g"), flush=True)
    wrong = not all(row["passed"] for row in record["correctness"])
    if not wrong:
        record["copy_bytes_per_second"] = ceiling = copy_bandwidth(sizes)
        print(f"copy: {ceiling / 1e9:.4g} GB/s", flush=True)
        record["rows"] = []
        for size in sizes.contexts:
            for batch in sizes.batches:
                rows = times(sizes, batch, size, begun)
                compared(rows, ceiling)
                record["rows"] += rows
                print(table(rows), flush=True)
        record["encoding"] = [r for b in sizes.batches for r in encoder_times(sizes, b, begun)]
        print(tabulate(record["encoding"], "keys", floatfmt=".3g"), flush=True)
    record["seconds"] = time.perf_counter() - begun
    save(record)
    if wrong:
        raise SystemExit("a kernel is wrong on this device, so none was timed")


if __name__ == "__main__":
    app.run(main)
