"""The kernel for GPUs (Mosaic GPU, Hopper).

As in the kernel for packed tiles, tokens (of keys) and channels (of values) are the 64 rows of a
warpgroup product and the few queries of a KV head its 8 to 32 columns; all operands are read from
shared memory, where the copies from HBM put them. The context is split over blocks of threads
("Flash-Decoding", Dao et al. 2023).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.ops.gpu_blocks import Gpu
from kvjax.ops.mosaic_gpu import (
    BY_QUERY,
    BY_ROW,
    COMPILER,
    F32,
    I32,
    LOG2E,
    ROWS,
    WG,
    columns_of,
    device_refusal,
    fold,
    full,
    load,
    soften,
    spread,
    tiled,
    unfold,
    walk_over,
    write,
)
from kvjax.ops.partials import DECODE, Partial, Scoring

TILES = {64: 128, 128: 64, 256: 64}  # head dim -> tokens that one step reads
STRIPE = 64  # numbers of 16 bits of a row of shared memory


def refusal(query: Array, key: Array, value: Array) -> str:
    """Why the kernel cannot take these arguments; "" if it can."""
    if query.shape[1] > DECODE:
        return f"it reads for at most {DECODE} tokens at once, not {query.shape[1]}"
    if key.dtype != value.dtype or key.dtype not in (jnp.bfloat16, jnp.float16):
        return f"keys and values must be bfloat16 or float16, not {key.dtype} and {value.dtype}"
    if key.shape[-1] not in TILES or key.shape != value.shape:
        return f"keys and values must have the same dim, one of {tuple(TILES)}, not {key.shape[-1]}"
    if key.shape[2] >= TILES[key.shape[-1]] and key.shape[2] % 8:
        return f"entries must come in eights, not {key.shape[2]}"
    return device_refusal()


def attention(
    query: Array,
    key: Array,
    value: Array,
    length: Array,
    bias: Array | None,
    *,
    scoring: Scoring,
    blocks: Gpu,
    interpret: Any = False,
) -> Partial:
    """The partial of T queries over the first `length` entries.

    Args:
      query: [B,T,H,D], T ≤ 8, D 64, 128 or 256; rounded to the keys' type.
      key, value: [B,K,S,D], bfloat16 or float16; S a multiple of 8, or less than a tile.
      length: [B] int32, valid entries, 0 … S. What lies in others never matters.
      bias: None or [B,1|T,S] float32, added to the scores; −inf hides an entry.
      scoring: scale and softcap.
      blocks: how the context is walked over.
      interpret: False, or `plgpu.InterpretGPUParams()`.
    """
    grouped, count = fold(query, key.shape[1])
    parts, columns, dim = grouped.shape[2:]
    size, tokens, rows = key.shape[2], query.shape[1], 0
    tile = TILES[dim]
    leaves = {"key": _padded(key, tile), "value": _padded(value, tile)}
    if bias is not None:
        rows = columns if bias.shape[1] > 1 else 1
        bias = bias.astype(F32) * LOG2E
        if rows > 1:
            bias = columns_of(bias, tokens, parts, columns).swapaxes(2, 3)
        leaves["bias"] = _padded(bias, tile)
    walk = _Walk(dim, columns, parts, rows, max(size, tile), tile, scoring, blocks, interpret)
    out, lse = _run(grouped.astype(key.dtype), length, leaves, walk)
    return unfold(out, lse, count, tokens)


def _padded(x: Array, least: int) -> Array:
    """At least so many entries, along axis 2."""
    missing = max(0, least - x.shape[2])
    return jnp.pad(x, [(0, missing if i == 2 else 0) for i in range(x.ndim)]) if missing else x


class _Walk(NamedTuple):
    """What a block of threads is compiled for."""

    dim: int
    columns: int  # queries, padded to a multiple of 8
    parts: int  # blocks that share the queries of a KV head
    rows: int  # of the bias: 0 (none), 1, or `columns`
    size: int
    tile: int
    scoring: Scoring
    blocks: Gpu
    interpret: Any


class _State(NamedTuple):
    top: Array  # [columns] the running maximum of the scores, in base 2
    total: Array  # [C,columns] Σ p of each row
    out: Array  # [D,columns]


def _run(
    query: Array, length: Array, leaves: dict[str, Array], walk: _Walk
) -> tuple[Array, Array]:
    """out [B,K,splits,parts,columns/8,D,8] and lse [B,K,splits,parts,columns]."""
    batch, heads = query.shape[:2]
    splits, parts, columns = walk.blocks.splits, walk.parts, walk.columns
    names = list(leaves)

    def body(length_ref: Any, q_ref: Any, *refs: Any, staged: Any, shared: Any) -> None:
        sources = dict(zip(names, refs, strict=False))
        _block(walk, length_ref, q_ref, sources, refs[len(names) :], staged, shared)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, splits, parts, columns // 8, walk.dim, 8), F32),
            jax.ShapeDtypeStruct((batch, heads, splits, parts, columns), F32),
        ),
        grid=(splits, heads * parts, batch),
        grid_names=("split", "head", "batch"),
        scratch_types={"staged": _staged(walk, names, query), "shared": _shared(walk, query)},
        compiler_params=COMPILER,
        interpret=walk.interpret or None,
    )(length.astype(I32), query, *leaves.values())


def _staged(walk: _Walk, names: list[str], query: Array) -> dict[str, Any]:
    stages = walk.blocks.stages
    entries = plgpu.SMEM((stages, walk.tile, walk.dim), query.dtype, transforms=tiled(STRIPE))
    wide = (walk.columns,) if walk.rows > 1 else ()
    bias = plgpu.SMEM((stages, walk.tile, *wide), F32)
    buffers = {name: bias if name == "bias" else entries for name in names}
    return {**buffers, "ready": plgpu.Barrier(num_arrivals=len(names), num_barriers=stages)}


def _shared(walk: _Walk, query: Array) -> dict[str, Any]:
    def operand(size: int) -> Any:
        return plgpu.SMEM((walk.columns, size), query.dtype, transforms=tiled(STRIPE))

    return {
        "query": operand(walk.dim),
        "weights": operand(walk.tile),
        "out": plgpu.SMEM((walk.columns // 8, walk.dim, 8), F32),
        "lse": plgpu.SMEM((walk.columns,), F32),
        "loaded": plgpu.Barrier(),
    }


def _block(
    walk: _Walk, length_ref: Any, q_ref: Any, sources: Any, targets: Any, staged: Any, shared: Any
) -> None:
    """One block of threads: one part of the context, one KV head, up to 32 of its queries.

    Threads meet at the start of a tile, so that all are past the one before, whose place can be
    filled again and whose weights be replaced; and when the weights are there.
    """
    stages = walk.blocks.stages
    batch, split, index = (lax.axis_index(name) for name in ("batch", "split", "head"))
    head, part = lax.div(index, walk.parts), lax.rem(index, walk.parts)
    valid = length_ref[batch]
    first, count = walk_over(lax.div(valid + (walk.tile - 1), walk.tile), walk.blocks.splits)

    def start(i: Any) -> Any:
        """The last tile starts early where tiles do not divide the entries."""
        return jnp.minimum((first + i) * walk.tile, walk.size - walk.tile)

    def fetch(i: Any) -> None:
        slot = lax.rem(i, stages)
        for name, source in sources.items():
            owner = head if name != "bias" else lax.rem(part, source.shape[1])
            source = source.at[batch, owner, pl.ds(start(i), walk.tile)]
            plgpu.copy_gmem_to_smem(source, staged[name].at[slot], staged["ready"].at[slot])

    for i in range(stages):
        pl.when(i < count)(partial(fetch, jnp.int32(i)))
    plgpu.copy_gmem_to_smem(q_ref.at[batch, head, part], shared["query"], shared["loaded"])
    plgpu.barrier_wait(shared["loaded"])

    def step(i: Array, state: _State) -> _State:
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(staged["ready"].at[slot])
        plgpu.commit_smem()
        again = i + (stages - 1)
        pl.when((i > 0) & (again < count))(partial(fetch, again))
        now = {name: ref.at[slot] for name, ref in staged.items() if name != "ready"}
        begin = start(i)
        return _tile(walk, now, shared, state, (first + i) * walk.tile - begin, valid - begin)

    state = _State(
        full((walk.columns,), -jnp.inf, BY_QUERY),
        full((walk.tile, walk.columns), 0.0),
        full((walk.dim, walk.columns), 0.0),
    )
    state = lax.fori_loop(0, count, step, state)
    where = (batch, head, split, part)
    refs = [target.at[where] for target in targets]
    write(state.top, state.total.sum(axis=0), state.out, shared, refs)


def _tile(
    walk: _Walk, now: Any, shared: Any, state: _State, begin: Array, end: Array
) -> _State:
    """A tile's share; of its entries, `begin` … `end` count."""
    tile, shape = walk.tile, (walk.tile, walk.columns)
    row = plgpu.broadcasted_iota(I32, shape, 0, layout=WG)
    scores = _product(now["key"], shared["query"], tile, walk)
    scores = jnp.where((row >= begin) & (row < end), _score(walk, now, scores), -jnp.inf)
    top, keep, (p,) = soften(state.top, [scores])
    total = state.total * spread(keep, shape, 1) + p
    weights = p.astype(now["value"].dtype)
    for i in range(tile // STRIPE):
        place = shared["weights"].at[:, i * STRIPE : (i + 1) * STRIPE].transpose((1, 0))
        part = weights[i * STRIPE : (i + 1) * STRIPE]
        place[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
    # A weight of 0 does not hide a NaN.
    pl.when(end < tile)(partial(_clear, now["value"], end))
    plgpu.commit_smem()
    new = _product(now["value"].transpose((1, 0)), shared["weights"], walk.dim, walk)
    return _State(top, total, state.out * spread(keep, state.out.shape, 1) + new)


def _score(walk: _Walk, now: Any, products: Array) -> Array:
    """Scores in base 2."""
    scale, softcap = walk.scoring
    scores = products * (scale * LOG2E if softcap is None else scale / softcap)
    if softcap is not None:
        scores = jnp.tanh(scores) * (softcap * LOG2E)
    if walk.rows == 1:
        return scores + spread(load(now["bias"], BY_ROW), scores.shape, 0)
    return scores + load(now["bias"], WG) if walk.rows else scores


def _clear(ref: Any, end: Array) -> None:
    """Zeros in the rows from `end` on."""
    for i in range(ref.shape[0] // ROWS):
        for j in range(ref.shape[1] // STRIPE):
            place = ref.at[i * ROWS : (i + 1) * ROWS, j * STRIPE : (j + 1) * STRIPE]
            x = load(place, WG)
            row = plgpu.broadcasted_iota(I32, x.shape, 0, layout=WG) + i * ROWS
            place[...] = jnp.where(row < end, x.astype(F32), 0.0).astype(x.dtype)


def _product(a: Any, b: Any, rows: int, walk: _Walk) -> Array:
    """a @ bᵀ, [rows,columns], both in shared memory."""

    def body(acc: Any) -> Array:
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((rows, walk.columns), F32))
