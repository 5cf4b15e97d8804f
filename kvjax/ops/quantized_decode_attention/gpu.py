"""The kernel for GPUs (Mosaic GPU, Hopper): codes go packed from HBM to registers, and unpacked to
no memory.

Everything is transposed: tokens (of keys) and channels (of values) are the 64 rows of a warpgroup
product, read from registers, and the few queries of a KV head are its 8 to 32 columns. So codes
are unpacked where the product wants them, and no query is padded to 64 rows.

Two codes of one packed word make one 32-bit register of two float16: a code's bits, set into the
mantissa of 1 at bit f, are 1 + code/2^(10−f), exactly. Where bits lie well already they are not
moved first, so f differs by plane (see `_fields`). A pair holds bytes `half` and `half` + 2 of the
word (`half` 0 or 1), hence rows 4r + half and 4r + half + 2 of its plane: all even rows of a tile
come from half 0, in order, and all odd rows from half 1. Queries and probabilities are stored even
rows first to match. With x = code·a + z,

    q·k_t = Σ_d q″_d·(1 + code_dt/2^(10−f)) + Σ_d (q_d·z_d − q″_d),    q″_d = 2^(10−f)·a_d·q_d

and likewise for values. q″ and p″ are rounded to float16 before they enter either sum, so that
their errors do not grow by the 1. Beyond 65504 the output is NaN: |q_d|/√D times the range of
that channel of keys must stay below 1400, and a token's range of values below 2000.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.ops.affine import Affine, Tile
from kvjax.ops.gpu_blocks import Gpu
from kvjax.ops.mosaic_gpu import (
    BY_QUERY,
    BY_ROW,
    COMPILER,
    F16,
    F32,
    I32,
    LOG2E,
    PAIRS,
    ROWS,
    TILED,
    WG,
    WORDS,
    columns_of,
    device_refusal,
    every_second,
    fold,
    full,
    halves,
    load,
    products,
    soften,
    spread,
    tiled,
    unfold,
    walk_over,
    write,
)
from kvjax.ops.packing import words
from kvjax.ops.partials import DECODE, Partial, Scoring

ONES = 0x3C003C00  # two float16 ones
SLACK = 4  # bits by which a field may lie below the top of the mantissa
# Channels, or queries × channels: a thread keeps a channel of each 32, or the pair it comes from.
QUERY = TILED(
    plgpu.Tiling(((8, 32), (2, 32), (1,))), warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1
)
CHANNELS = TILED(
    plgpu.Tiling(((64,), (2,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)


def refusal(query: Array, value: Tile, format: Affine) -> str:
    """Why the kernel cannot take these arguments; "" if it can."""
    dim, dim_v = query.shape[-1], value["codes"].shape[-1]
    if query.shape[1] > DECODE:
        return f"it reads for at most {DECODE} tokens at once, not {query.shape[1]}"
    if dim not in (64, 128) or dim_v != dim:
        return f"keys and values must have the same dim, 64 or 128, not {dim} and {dim_v}"
    if format.tile != 128:
        return f"tiles must have 128 tokens, not {format.tile}"
    for role in ("key", "value"):
        bits = format.bits(role)
        if bits == 3 or words(format.shape(role, dim)[0], bits) % 4:
            return f"codes of {bits} bits at dim {dim} do not fill its registers"
    return device_refusal()


def attention(
    query: Array,
    key: Tile,
    value: Tile,
    length: Array,
    bias: Array | None,
    *,
    format: Affine,
    scoring: Scoring,
    blocks: Gpu,
    interpret: Any = False,
) -> Partial:
    """The partial of T queries over the first `length` tokens of packed tiles.

    Args:
      query: [B,T,H,D], T ≤ 8, D 64 or 128, in the stored frame.
      key, value: leaves [B,K,N,...] as `Affine` says.
      length: [B] int32, valid tokens, 0 … N·C. What lies in other slots never matters.
      bias: None or [B,1|T,N·C] float32, added to the scores; −inf hides an entry.
      format: how tiles are stored.
      scoring: scale and softcap.
      blocks: how the context is walked over.
      interpret: False, or `plgpu.InterpretGPUParams()`.
    """
    grouped, count = fold(query, key["codes"].shape[1])
    factor = scoring.scale * LOG2E if scoring.softcap is None else scoring.scale / scoring.softcap
    q = grouped.astype(F32) * factor
    # Even channels, then odd ones: [B,K,parts,2,columns,D/2].
    q = jnp.moveaxis(q.reshape(*q.shape[:-1], -1, 2), -1, 3)
    leaves = {
        "key_codes": key["codes"],
        "key_affine": key["affine"],
        "value_codes": value["codes"],
        "value_affine": value["affine"],
    }
    if format.column:
        leaves |= {"key_column": key["column"], "value_column": value["column"]}
    parts, columns, dim = grouped.shape[2:]
    rows, tokens = 0, query.shape[1]
    if bias is not None:
        rows = columns if bias.shape[1] > 1 else 1
        leaves["bias"] = _arrange(bias.astype(F32) * LOG2E, tokens, parts, columns, format.tile)
    walk = _Walk(dim, columns, parts, rows, format, scoring, blocks, interpret)
    out, lse = _run(q, length, leaves, walk)
    return unfold(out, lse, count, tokens)


def _arrange(bias: Array, tokens: int, parts: int, columns: int, tile: int) -> Array:
    """A bias that all queries share as [B,1,N,C]; else [B,parts,N,2,C/2,columns], even tokens
    first."""
    batch, each, _ = bias.shape
    if each == 1:
        return bias.reshape(batch, 1, -1, tile)
    wide = columns_of(bias, tokens, parts, columns)
    wide = wide.reshape(batch, parts, columns, -1, tile // 2, 2)
    return wide.transpose(0, 1, 3, 5, 4, 2)


class _Walk(NamedTuple):
    """What a block of threads is compiled for."""

    dim: int
    columns: int  # queries, padded to a multiple of 8
    parts: int  # blocks that share the queries of a KV head
    rows: int  # of the bias: 0 (none), 1, or `columns`
    format: Affine
    scoring: Scoring
    blocks: Gpu
    interpret: Any


class _State(NamedTuple):
    top: Array  # [columns] the running maximum of the scores, in base 2
    total: Array  # [64,columns] Σ p of each row
    shift: Array  # [64,columns] Σ (p·z − p″) of each row
    out: Array  # [D,columns]


def _run(
    q: Array, length: Array, leaves: dict[str, Array], walk: _Walk
) -> tuple[Array, Array]:
    """out [B,K,splits,parts,columns/8,D,8] and lse [B,K,splits,parts,columns]."""
    batch, heads = q.shape[:2]
    splits, parts, columns = walk.blocks.splits, walk.parts, walk.columns
    names = list(leaves)

    def body(length_ref: Any, q_ref: Any, *refs: Any, scratch: Any, shared: Any) -> None:
        sources, (out_ref, lse_ref) = dict(zip(names, refs, strict=False)), refs[len(names) :]
        _block(walk, length_ref, q_ref, sources, out_ref, lse_ref, scratch, shared)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, splits, parts, columns // 8, walk.dim, 8), F32),
            jax.ShapeDtypeStruct((batch, heads, splits, parts, columns), F32),
        ),
        grid=(splits, heads * parts, batch),
        grid_names=("split", "head", "batch"),
        scratch_types={"scratch": _staged(walk, names), "shared": _shared(walk)},
        compiler_params=COMPILER,
        interpret=walk.interpret or None,
    )(jnp.append(length.astype(I32), I32.type(ONES)), q, *leaves.values())


def _staged(walk: _Walk, names: list[str]) -> dict[str, Any]:
    """The copies of a tile: `stages` of them are on their way or being read."""
    fmt, dim, tile = walk.format, walk.dim, walk.format.tile
    shapes = {
        "key_codes": (words(dim, fmt.key_bits), tile),
        "key_affine": (dim,),
        "value_codes": (words(tile, fmt.value_bits), dim),
        "value_affine": (tile,),
        "key_column": (tile,),
        "value_column": (dim,),
        "bias": (tile,) if walk.rows == 1 else (2, tile // 2, walk.columns),
    }
    stages = walk.blocks.stages
    buffers = {
        name: plgpu.SMEM((stages, *shapes[name]), F32 if name == "bias" else I32)
        for name in names
    }
    copies = len(names) + 2 * fmt.column
    return {**buffers, "ready": plgpu.Barrier(num_arrivals=copies, num_barriers=stages)}


def _shared(walk: _Walk) -> dict[str, Any]:
    def operand(size: int) -> Any:
        return plgpu.SMEM((walk.columns, size), F16, transforms=tiled(size // 2))

    return {
        "query": plgpu.SMEM((2, walk.columns, walk.dim // 2), F32),
        "scaled": operand(walk.dim),
        "weights": operand(walk.format.tile),
        "constant": plgpu.SMEM((walk.columns,), F32),
        "out": plgpu.SMEM((walk.columns // 8, walk.dim, 8), F32),
        "lse": plgpu.SMEM((walk.columns,), F32),
        "loaded": plgpu.Barrier(),
    }


def _block(
    walk: _Walk, length_ref: Any, q_ref: Any, sources: Any, out_ref: Any, lse_ref: Any,
    staged: Any, shared: Any,
) -> None:  # fmt: skip
    """One block of threads: one part of the context, one KV head, up to 32 of its queries.

    Threads meet twice a tile, when the query is scaled and when the weights are there. The query
    of the next tile is written after the second, so after all products with this one; the next
    weights, and the copy into this tile's place, come after the first of the next tile.
    """
    stages, tile = walk.blocks.stages, walk.format.tile
    batch, split, index = (lax.axis_index(name) for name in ("batch", "split", "head"))
    head, part = lax.div(index, walk.parts), lax.rem(index, walk.parts)
    # Read and not written down: an instruction that masks and sets takes one constant alone.
    valid, ones = length_ref[batch], length_ref[length_ref.shape[0] - 1]
    first, count = walk_over(lax.div(valid + (tile - 1), tile), walk.blocks.splits)

    def fetch(i: Any) -> None:
        slot = lax.rem(i, stages)
        for name, source in sources.items():
            owner = head if name != "bias" else lax.rem(part, max(1, source.shape[1]))
            where = (batch, owner, first + i)
            source, target = source.at[where], staged[name].at[slot]
            if name.endswith("column"):  # twice, for its two halves
                half = target.shape[0] // 2
                for place in (target.at[pl.ds(0, half)], target.at[pl.ds(half, half)]):
                    plgpu.copy_gmem_to_smem(source, place, staged["ready"].at[slot])
            else:
                plgpu.copy_gmem_to_smem(source, target, staged["ready"].at[slot])

    for i in range(stages):
        pl.when(i < count)(partial(fetch, jnp.int32(i)))
    plgpu.copy_gmem_to_smem(q_ref.at[batch, head, part], shared["query"], shared["loaded"])
    plgpu.barrier_wait(shared["loaded"])

    def step(i: Array, state: _State) -> _State:
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(staged["ready"].at[slot])
        now = {name: ref.at[slot] for name, ref in staged.items() if name != "ready"}
        _scale_query(walk, now, shared)
        plgpu.commit_smem()
        # Every thread is past the tile before, so its place can be filled again.
        again = i + (stages - 1)
        pl.when((i > 0) & (again < count))(partial(fetch, again))
        return _tile(walk, now, shared, state, valid - (first + i) * tile, ones)

    state = _State(
        full((walk.columns,), -jnp.inf, BY_QUERY),
        full((ROWS, walk.columns), 0.0),
        full((ROWS, walk.columns), 0.0),
        full((walk.dim, walk.columns), 0.0),
    )
    state = lax.fori_loop(0, count, step, state)
    out = state.out + spread(state.shift.sum(axis=0), state.out.shape, 1)
    where = (batch, head, split, part)
    targets = (out_ref.at[where], lse_ref.at[where])
    write(state.top, state.total.sum(axis=0), out, shared, targets)


def _scale_query(walk: _Walk, now: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """Writes q″, and Σ_d (q_d·z_d − q″_d)."""
    half, bits = walk.dim // 2, walk.format.key_bits
    pairs = load(now["key_affine"], CHANNELS)
    shape = (walk.columns, half)
    rest = full(shape, 0.0, QUERY)
    for parity in range(2):
        pair = every_second(pairs, parity, CHANNELS, QUERY.reduce(0), bool(walk.interpret))
        scale, zero = _affine(pair, walk.format.meta_dtype)
        query = load(shared["query"].at[parity], QUERY)
        scale = scale * _powers(half, bits, parity, QUERY.reduce(0))
        scaled = (query * spread(scale, shape, 1, QUERY)).astype(F16)
        shared["scaled"][:, parity * half : (parity + 1) * half] = scaled
        rest = rest + (query * spread(zero, shape, 1, QUERY) - scaled.astype(F32))
    shared["constant"][...] = rest.sum(axis=1)


def _tile(
    walk: _Walk, now: Mapping[str, Any], shared: Mapping[str, Any], state: _State, left: Array,
    ones: Array,
) -> _State:  # fmt: skip
    """A tile's share; its first `left` tokens count."""
    fmt, columns, meta = walk.format, walk.columns, walk.format.meta_dtype
    interpret, shape = bool(walk.interpret), (ROWS, columns)
    row = 2 * plgpu.broadcasted_iota(I32, shape, 0, layout=WG)
    seen = [row + parity < left for parity in range(2)]
    scores = _scores(walk, now, shared, seen, ones)
    top, keep, weights = soften(state.top, scores)
    pairs = load(now["value_affine"], PAIRS)
    total, shift = state.total * spread(keep, shape, 1), full(shape, 0.0)
    for parity in range(2):
        p = weights[parity]
        total = total + p
        pair = every_second(pairs, parity, PAIRS, BY_ROW, interpret)
        scale, zero = _affine(pair, meta)
        power = _powers(ROWS, fmt.value_bits, parity, BY_ROW)
        # Where nothing is seen p is 0, but the scale may be NaN.
        weight = jnp.where(seen[parity], p * spread(scale * power, shape, 0), 0.0).astype(F16)
        part = jnp.where(seen[parity], p * spread(zero, shape, 0), 0.0)
        shift = shift + (part - weight.astype(F32))
        place = shared["weights"].at[:, parity * ROWS : (parity + 1) * ROWS]
        place.transpose((1, 0))[...] = plgpu.layout_cast(weight, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()

    codes = _words(now["value_codes"], None, interpret)
    weighted = [
        (_unpack(codes, ones, half, fmt.value_bits, interpret),
         shared["weights"].at[:, half * ROWS : (half + 1) * ROWS])
        for half in range(2)
    ]  # fmt: skip
    (new,) = products([weighted], walk.dim, columns, interpret)
    out = state.out * spread(keep, state.out.shape, 1)
    if not fmt.column:
        return _State(top, total, state.shift * spread(keep, shape, 1) + shift, out + new)
    new = new + spread(shift.sum(axis=0), new.shape, 1)
    factor = _factors(load(now["value_column"], BY_ROW), meta)
    return _State(top, total, state.shift, out + new * spread(factor, new.shape, 0))


def _scores(
    walk: _Walk, now: Mapping[str, Any], shared: Mapping[str, Any], seen: list[Array], ones: Array
) -> list[Array]:
    """[64,columns] in base 2 of the even tokens, and of the odd ones; −inf where not `seen`."""
    bits, interpret, half = walk.format.key_bits, bool(walk.interpret), walk.dim // 2
    codes = [_words(now["key_codes"], parity, interpret) for parity in range(2)]
    query = [shared["scaled"].at[:, h * half : (h + 1) * half] for h in range(2)]
    sums = products(
        [[(_unpack(x, ones, h, bits, interpret), query[h]) for h in range(2)] for x in codes],
        ROWS, walk.columns, interpret,
    )  # fmt: skip
    constant = spread(load(shared["constant"], BY_QUERY), (ROWS, walk.columns), 1)
    scores = [_score(walk, now, x + constant, parity) for parity, x in enumerate(sums)]
    return [jnp.where(s, x, -jnp.inf) for s, x in zip(seen, scores, strict=True)]


def _score(walk: _Walk, now: Mapping[str, Any], scores: Array, parity: int) -> Array:
    """From q·(code·a + z) to what enters the softmax."""
    interpret = bool(walk.interpret)
    if walk.format.column:
        pair = every_second(load(now["key_column"], PAIRS), parity, PAIRS, BY_ROW, interpret)
        scores = scores * spread(_factors(pair, walk.format.meta_dtype), scores.shape, 0)
    if walk.scoring.softcap is not None:
        scores = jnp.tanh(scores) * (walk.scoring.softcap * LOG2E)
    if walk.rows == 1:
        bias = every_second(load(now["bias"], PAIRS), parity, PAIRS, BY_ROW, interpret)
        return scores + spread(bias, scores.shape, 0)
    return scores + load(now["bias"].at[parity], WG) if walk.rows else scores


def _words(ref: Any, parity: int | None, interpret: bool) -> Array:
    """Words [W,M] as [M,W,1], or of every second column as [M/2,W,1]."""
    count, minor = ref.shape
    if interpret:
        x = ref[...].T[..., None]
        return x if parity is None else x[parity::2]
    if parity is None:
        view = ref.reshape(count, minor, 1)
    else:
        view = ref.reshape(count, minor // 2, 2).at[:, :, pl.ds(parity, 1)]
    return load(view.transpose((1, 0, 2)), WORDS)


def _fields(bits: int, half: int) -> list[tuple[int, int]]:
    """For each plane of a half, how far right words are moved and where codes then lie, f."""
    highest = 10 - bits
    lowest = max(0, highest - SLACK)
    moves, fields = [0], []
    for place in range(8 * half, 8 * half + 8, bits):
        fits = [move for move in moves if lowest <= place - move <= highest]
        if not fits:
            fits = [place - lowest]
            moves += fits
        fields.append((fits[0], place - fits[0]))
    return fields


def _powers(count: int, bits: int, half: int, layout: Any) -> Array:
    """2^(10−f) of the rows of a half, [count]."""
    planes = [2.0 ** (10 - field) for _, field in _fields(bits, half)]
    row = plgpu.broadcasted_iota(I32, (count,), 0, layout=layout)
    power = full((count,), planes[0], layout)
    for plane, value in enumerate(planes[1:], 1):
        power = jnp.where(row < plane * (count // len(planes)), power, value)
    return power


def _unpack(codes: Array, ones: Array, half: int, bits: int, interpret: bool) -> Array:
    """float16 1 + code/2^(10−f) of every second row, [M,R/2]."""
    moved = {0: codes}
    blocks = []
    for move, field in _fields(bits, half):
        if move not in moved:
            right = lax.shift_right_logical(codes, jnp.int32(max(move, 0)))
            moved[move] = codes << -move if move < 0 else right
        mask = ((1 << bits) - 1 << field) * 0x00010001
        blocks.append(moved[move] & mask | ones)
    return halves(blocks, interpret)


def _affine(pair: Array, meta: str) -> tuple[Array, Array]:
    return _upper(pair, meta), _lower(pair, meta)


def _upper(pair: Array, meta: str) -> Array:
    return _lower(lax.shift_right_logical(pair, jnp.int32(16)), meta)


def _lower(pair: Array, meta: str) -> Array:
    """The 16-bit number in a word's lower half, as float32."""
    return lax.bitcast_convert_type(pair.astype(jnp.int16), jnp.dtype(meta)).astype(F32)


def _factors(pair: Array, meta: str) -> Array:
    """Factors of M entries, or of every second one, whose pairs are laid out twice."""
    index = plgpu.broadcasted_iota(I32, pair.shape, 0, layout=BY_ROW)
    return jnp.where(index < pair.shape[0] // 2, _upper(pair, meta), _lower(pair, meta))
