"""The kernel for TPUs (Mosaic): codes go from packed words to the matrix unit without ever becoming
numbers.

Every byte of ``(word >> 2·j) & 0x03030303 | 0x3C3C3C3C`` is 1 + code/4 in the 8-bit float e5m2,
which the matrix unit multiplies with bfloat16 exactly. So two bits of a code are a *plane* x, with
bits = 4·(x − 1); codes of more bits are several planes, of weights w = 4, 16, 64, 256, and a single
bit is 1 + bit/2. Scales never touch a code:

    Σ_d q_d·(a_d·code_dt + z_d) = Σ_planes Σ_d w·q′_d·x_dt + Σ_d (q_d·z_d − W·q′_d),  q′_d = q_d·a_d

with W the sum of the weights; likewise for values, with p_t in place of q_d. q′ is rounded to
bfloat16 before it enters either sum, so that its errors do not grow by the 1 in x. A column factor
multiplies a score (keys), or what a tile adds to the output (values).

The walk goes over items: a few thousand tokens of one or two KV heads. Scores of an item are made
beside probabilities and output of the item before it, in one stretch of code without branches, so
that the compiler fills the waits of the one with the work of the other, and copies of the items
ahead run meanwhile. Two heads share each product: the query is block-diagonal, and the blocks off
the diagonal of the output are thrown away.

Scores and probabilities are float32; products take bfloat16 operands and add in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops.affine import Affine, Tile
from kvjax.ops.mosaic_tpu import bias_rows
from kvjax.ops.partials import DECODE, Partial, Scoring, group_queries, ungroup
from kvjax.ops.quantized_decode_attention.blocks import LANES, SUBLANES, Tpu

FLOOR = -1e20  # below every score: the maximum over nothing, so that exp2(−inf − FLOOR) is 0
LOG2E = math.log2(math.e)
RUN = 8  # tiles whose outputs one product adds up
SIZES = (64, 128)  # of head dims and tiles
LAG = 16  # tiles by which outputs follow scores
AHEAD = 2  # items whose copies are under way
BUFFERS = AHEAD + 2  # of each leaf: those, an item whose scores are made, one whose output is
VMEM_BYTES = 60 * 2**20  # what the smallest chip (7x, 64 MiB) can give


def refusal(query: Array, value: Tile, format: Affine) -> str:
    """Why the kernel cannot take these arguments; "" if it can."""
    tokens, dim = query.shape[1], query.shape[-1]
    if tokens > DECODE:
        return f"{tokens} new tokens, it takes up to {DECODE}"
    if value["codes"].shape[-1] != dim:
        return f"head dims {dim} of keys and {value['codes'].shape[-1]} of values differ"
    if dim not in SIZES:
        return f"head_dim {dim}, it takes one of {SIZES}"
    if format.tile not in SIZES:
        return f"tile={format.tile}, it takes one of {SIZES}"
    return ""


class _Shape(NamedTuple):
    """What the kernel needs to know at compile time."""

    format: Affine
    dim: int
    tiles: int  # N
    tokens: int  # T
    kv_heads: int
    group: int  # rows of a head, G·T
    rows: int  # of the heads of a step, padded to whole registers
    share: int  # rows of the walk, each a (b, split, pair), of one program
    scoring: Scoring
    blocks: Tpu
    bias_rows: int

    @property
    def pairs(self) -> int:
        return self.kv_heads // self.blocks.heads


def attention(
    query: Array,
    key: Tile,
    value: Tile,
    length: Array,
    bias: Array | None,
    *,
    format: Affine,
    scoring: Scoring,
    blocks: Tpu,
    interpret: Any = False,
) -> Partial:
    """The partial of T queries over the first `length` tokens of each row.

    Args:
      query: [B,T,H,D], in the stored frame.
      key, value: leaves [B,K,N,...] as `Affine` says.
      length: [B] int32, valid tokens, 0 … N·C. Later ones may hold anything, NaN included.
      bias: [B,1|T,N·C] float32, added to the scores; −inf hides an entry.
      format, scoring: as for `quantized_decode_attention`.
      blocks: how to walk over the cache.
      interpret: what `pallas_call` takes.
    """
    batch, tokens, _, dim = query.shape
    kv_heads, tiles = key["codes"].shape[1:3]
    blocks.check(kv_heads, tiles)
    grouped = group_queries(query.astype(jnp.float32), kv_heads)
    group = grouped.shape[2]
    kept, pairs = blocks.heads * group, kv_heads // blocks.heads
    rows = -(-kept // SUBLANES) * SUBLANES
    padded = grouped.reshape(batch * pairs, kept, dim)
    padded = jnp.pad(padded, [(0, 0), (0, rows - kept), (0, 0)])
    share = -(-batch * blocks.splits * pairs // blocks.programs)
    shape = _Shape(
        format, dim, tiles, tokens, kv_heads, group, rows, share, scoring, blocks,
        0 if bias is None else bias.shape[1],
    )  # fmt: skip
    out, lse = _call(shape, padded, key, value, length, bias, interpret)
    out = out[..., :kept, :].reshape(batch, blocks.splits, kv_heads, group, dim)
    lse = lse[..., :kept, 0].reshape(batch, blocks.splits, kv_heads, group)
    out, lse = _join(out, lse)
    return Partial(ungroup(out, tokens), ungroup(lse, tokens))


def _join(out: Array, lse: Array) -> Partial:
    """Merges splits, axis 1."""
    if out.shape[1] == 1:
        return Partial(out[:, 0], lse[:, 0])
    total = jax.nn.logsumexp(lse, axis=1)
    share = jnp.exp(lse - jnp.where(jnp.isfinite(total), total, 0.0)[:, None])
    return Partial((share[..., None] * out).sum(1), total)


def _schedule(shape: _Shape, length: Array) -> tuple[Array, Array, Array]:
    """First step and end of each (b, split), [B·splits], and the items of each program.

    A split that has nothing left still has one step, which finds nothing.
    """
    blocks = shape.blocks
    steps = -(-length // (blocks.tiles * shape.format.tile))
    each = -(-steps // blocks.splits)
    begin = each[:, None] * jnp.arange(blocks.splits, dtype=jnp.int32)
    end = jnp.maximum(jnp.minimum(begin + each[:, None], steps[:, None]), begin + 1)
    begin, end = begin.reshape(-1), end.reshape(-1)
    items = jnp.repeat(end - begin, shape.pairs)
    items = jnp.pad(items, (0, -items.shape[0] % shape.share))
    return begin, end, items.reshape(-1, shape.share).sum(1)


Leaves = dict[tuple[str, str], Any]


def _call(
    shape: _Shape,
    query: Array,
    key: Tile,
    value: Tile,
    length: Array,
    bias: Array | None,
    interpret: Any,
) -> tuple[Array, Array]:
    """query [B·K/P,rows,D] -> out [B·splits·K/P,rows,D] and lse [B·splits·K/P,rows,128]."""
    leaves: Leaves = {("key", name): x for name, x in key.items()}
    leaves |= {("value", name): x for name, x in value.items()}
    if bias is not None:
        leaves["key", "bias"] = bias
    walk = length.shape[0] * shape.blocks.splits * shape.pairs
    programs = -(-walk // shape.share)
    whole = pl.BlockSpec(query.shape, lambda c, *_: (0, 0, 0))
    result = pl.pallas_call(
        functools.partial(_kernel, shape, tuple(leaves)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(programs,),
            in_specs=[whole, *[pl.BlockSpec(memory_space=pl.ANY)] * len(leaves)],
            out_specs=[
                pl.BlockSpec((shape.share, shape.rows, width), lambda c, *_: (c, 0, 0))
                for width in (shape.dim, LANES)
            ],
            scratch_shapes=_scratch(shape, leaves),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((walk, shape.rows, width), jnp.float32)
            for width in (shape.dim, LANES)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=VMEM_BYTES,
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
        ),
        interpret=interpret,
        name="quantized_decode_attention",
    )(length, *_schedule(shape, length), query, *leaves.values())
    return tuple(result)


def _scratch(shape: _Shape, leaves: Leaves) -> list[Any]:
    blocks, tile, dim = shape.blocks, shape.format.tile, shape.dim
    widths = [dim, dim, tile, tile] + ([tile, dim] if shape.format.column else [])
    f32 = functools.partial(pltpu.VMEM, dtype=jnp.float32)
    buffers = []
    for (_, name), leaf in leaves.items():
        minor = leaf.shape[3:]
        one = (blocks.heads, blocks.tiles, *minor)
        if name == "bias":
            one = (shape.bias_rows, blocks.tiles * tile)
        buffers.append(pltpu.VMEM((BUFFERS, *one), leaf.dtype))
    return [
        pltpu.SemaphoreType.DMA((2, BUFFERS)),
        f32((blocks.tiles, shape.rows, tile)),  # scores of the step before
        f32((shape.rows, tile)),  # and their maximum over its tiles
        f32((shape.rows, LANES)),  # maximum so far
        f32((shape.rows, LANES)),  # Σ p so far
        f32((shape.rows, blocks.heads * dim)),  # Σ p·v so far
        *[f32((blocks.heads, blocks.tiles, width)) for width in widths],
        *buffers,
    ]


class _Item(NamedTuple):
    """One step's work: scalars."""

    group: Any  # b·splits + split
    pair: Any
    step: Any


class _Refs(NamedTuple):
    length: Any  # [B] SMEM, and so on: see `_schedule`
    begin: Any
    end: Any
    items: Any
    query: Any  # [B·K/P,rows,D]
    stored: Leaves  # in HBM
    out: Any  # [share,rows,D]
    lse: Any  # [share,rows,128]
    semaphore: Any  # [2,BUFFERS]
    scores: Any  # and so on: see `_scratch`
    tile_top: Any
    top: Any
    total: Any
    sum: Any
    meta: tuple[Any, ...]
    buffers: Leaves


def _kernel(shape: _Shape, names: tuple[tuple[str, str], ...], *args: Any) -> None:
    leaves = len(names)
    stored, buffers = args[5 : 5 + leaves], args[-leaves:]
    others = args[5 + leaves : -leaves]
    refs = _Refs(
        *args[:5], dict(zip(names, stored, strict=True)), *others[:8], others[8:],
        dict(zip(names, buffers, strict=True)),
    )  # type: ignore[call-arg]  # fmt: skip
    _walk(shape, refs)


def _walk(shape: _Shape, refs: _Refs) -> None:
    """One program's share of the rows: a pipeline of copies, scores, outputs and rows written."""
    first_row = pl.program_id(0) * shape.share
    total = refs.items[pl.program_id(0)]
    group = lax.div(first_row, shape.pairs)
    item = _Item(group, first_row - group * shape.pairs, refs.begin[group])
    queue = [item]
    for g in range(AHEAD):
        _start(shape, refs, queue[-1], g, g < total)
        queue.append(_next(shape, refs, queue[-1]))

    def body(g: Any, carry: tuple[_Item, ...]) -> tuple[_Item, ...]:
        last, before, now, *_, ahead = carry
        _start(shape, refs, ahead, g + AHEAD, g + AHEAD < total)
        _wait(shape, refs, "key", now, g, g < total)
        _wait(shape, refs, "value", before, g - 1, g > 0)
        _finish(shape, refs, last, first_row)
        _compute(shape, refs, before, now, g)
        return (*carry[1:], _next(shape, refs, ahead))

    last, *_ = lax.fori_loop(0, total + 1, body, (item, item, *queue))
    _finish(shape, refs, last, first_row)


def _next(shape: _Shape, refs: _Refs, item: _Item) -> _Item:
    done = item.step + 1 >= refs.end[item.group]
    turn = done & (item.pair + 1 == shape.pairs)
    # Beyond the last group nothing is read: any group will do.
    group = jnp.where(turn, item.group + 1, item.group)
    group = jnp.minimum(group, refs.end.shape[0] - 1)
    pair = jnp.where(turn, 0, jnp.where(done, item.pair + 1, item.pair))
    return _Item(group, pair, jnp.where(done, refs.begin[group], item.step + 1))


def _copies(shape: _Shape, refs: _Refs, role: str, item: _Item, g: Any, tiles: int) -> list[Any]:
    """Copies of an item's keys or values into the buffers of turn g."""
    heads, tile = shape.blocks.heads, shape.format.tile
    row = _row(shape, item)
    slot = g % BUFFERS
    at: Any = 0
    if shape.blocks.tiles < shape.tiles:
        at = pl.multiple_of(item.step * shape.blocks.tiles, SUBLANES)
    copies = []
    for name, source in refs.stored.items():
        if name[0] != role:
            continue
        target = refs.buffers[name].at[slot]
        if name[1] == "bias":
            source = source.at[row, :, pl.ds(at * tile, tiles * tile)]
            target = target.at[:, pl.ds(0, tiles * tile)]
        else:
            source = source.at[row, pl.ds(item.pair * heads, heads), pl.ds(at, tiles)]
            target = target.at[:, pl.ds(0, tiles)]
        semaphore = refs.semaphore.at[("key", "value").index(role), slot]
        copies.append(pltpu.make_async_copy(source, target, semaphore))
    return copies


def _row(shape: _Shape, item: _Item) -> Any:
    splits = shape.blocks.splits
    return item.group if splits == 1 else lax.div(item.group, splits)


def _for_copies(shape: _Shape, refs: _Refs, role: str, item: _Item, g: Any, there: Any,
                act: Callable[[Any], None]) -> None:  # fmt: skip
    """Runs `act` on an item's copies where the item exists; the last step may be shorter."""
    step, rest = shape.blocks.tiles, shape.tiles % shape.blocks.tiles

    def run(condition: Any, tiles: int) -> None:
        @pl.when(condition)
        def _() -> None:
            for copy in _copies(shape, refs, role, item, g, tiles):
                act(copy)

    if rest == 0:
        return run(there, step)
    last = item.step == shape.tiles // step
    run(there & jnp.logical_not(last), step)
    return run(there & last, rest)


def _start(shape: _Shape, refs: _Refs, item: _Item, g: Any, there: Any) -> None:
    for role in ("key", "value"):
        _for_copies(shape, refs, role, item, g, there, lambda copy: copy.start())


def _wait(shape: _Shape, refs: _Refs, role: str, item: _Item, g: Any, there: Any) -> None:
    _for_copies(shape, refs, role, item, g, there, lambda copy: copy.wait())


def _left(shape: _Shape, refs: _Refs, item: _Item) -> Any:
    """How many tokens of the item are valid; may be negative."""
    skipped = item.step * (shape.blocks.tiles * shape.format.tile)
    return refs.length[_row(shape, item)] - skipped


class _Side(NamedTuple):
    """An item's keys or values in VMEM: packed codes, and float32 rows of metadata by tile."""

    codes: Any  # [P,n,W,M]
    scale: Any  # [P,n,R], a times the first plane's weight
    zero: Any  # [P,n,R]
    column: Any  # [P,n,M] or None
    bits: int


def _side(shape: _Shape, refs: _Refs, role: str, g: Any, left: Any) -> _Side:
    """Turns 16-bit pairs to float32 rows in scratch, many tiles to a register. What is invalid
    becomes 0 where it would meet probabilities: 0·NaN is NaN."""
    slot = g % BUFFERS
    at = ("key", "value").index(role)
    column = refs.meta[4 + at] if shape.format.column else None
    side = _Side(refs.buffers[role, "codes"].at[slot], refs.meta[2 * at], refs.meta[2 * at + 1],
                 column, shape.format.bits(role))  # fmt: skip
    tile, tiles, dtype = shape.format.tile, shape.blocks.tiles, shape.format.meta_dtype
    token = lax.broadcasted_iota(jnp.int32, (tiles, tile), 0) * tile
    token += lax.broadcasted_iota(jnp.int32, (tiles, tile), 1)
    for head in range(shape.blocks.heads):
        scale, zero = _pair(refs.buffers[role, "affine"][slot, head], dtype)
        if role == "value":
            scale, zero = (jnp.where(token < left, x, 0.0) for x in (scale, zero))
        side.scale[head] = scale * _weights(side.bits)[0]
        side.zero[head] = zero
        if column is not None:
            both = jnp.concatenate(_pair(refs.buffers[role, "column"][slot, head], dtype), -1)
            if role == "value":
                start = lax.broadcasted_iota(jnp.int32, both.shape, 0) * tile
                both = jnp.where(start < left, both, 0.0)
            column[head] = both
    return side


def _own(shape: _Shape, both: Array) -> Array:
    """[rows,P·D] -> [rows,D]: the blocks on the diagonal."""
    if shape.blocks.heads == 1:
        return both
    return _by_head(shape, [both[:, : shape.dim], both[:, shape.dim :]])


def _by_head(shape: _Shape, parts: Sequence[Array]) -> Array:
    """A head's rows from that head's part, parts [rows|1, n] -> [rows,n]."""
    if len(parts) == 1:
        return parts[0]
    width = parts[0].shape[-1]
    one, other = (jnp.broadcast_to(x, (shape.rows, width)) for x in parts)
    first = lax.broadcasted_iota(jnp.int32, one.shape, 0) < shape.group
    return jnp.where(first, one, other)


def _pair(word: Array, dtype: str) -> tuple[Array, Array]:
    """The high and the low half of int32 words as float32."""
    if dtype == "bfloat16":
        high = lax.bitcast_convert_type(word & jnp.int32(-65536), jnp.float32)
        return high, lax.bitcast_convert_type(word << 16, jnp.float32)
    return _from_float16(word), _from_float16(word << 16)


def _from_float16(high: Array) -> Array:
    """The float16 in the high half of int32 words as float32, by integers: TPUs have no float16.

    The exponent moves from bias 15 to 127. A subnormal m·2⁻²⁴ then reads 2⁻¹⁵·(1 + m/1024), and
    2x − 2⁻¹⁴ mends it; of the two the smaller one is always right.
    """
    exponent = ((high >> 3) & 0x0FFFE000) + (112 << 23)
    magnitude = lax.bitcast_convert_type(exponent, jnp.float32)
    magnitude = jnp.minimum(magnitude, magnitude + magnitude - 2.0**-14)
    sign = high & jnp.int32(-(2**31))
    word = lax.bitcast_convert_type(magnitude, jnp.int32) | sign
    return lax.bitcast_convert_type(word, jnp.float32)


def _weights(bits: int) -> list[float]:
    """w of each plane of e5m2 numbers x, with codes = Σ w·(x − 1)."""
    if bits == 1:
        return [2.0]
    if bits == 3:
        return [4.0, 8.0]
    return [4.0 * 4**k for k in range(bits // 2)]


def _round(x: Array) -> Array:
    """float32 rounded to bfloat16."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _offset(x: Array, bits: int) -> Array:
    """What scaled numbers x add by the 1 in every plane."""
    total = sum(_weights(bits)) / _weights(bits)[0]
    return x if total == 1 else x * total


def _weighted(x: Array, bits: int) -> Array:
    """x of scaled numbers, the first plane's weight in it, for each plane side by side."""
    first, *others = _weights(bits)
    return jnp.concatenate([x, *(x * (w / first) for w in others)], 1)


def _planes(words: Array, bits: int) -> list[Array]:
    """Packed int32 [W,M] to one e5m2 [rows,M] for each of `_weights`."""
    if bits == 3:
        split = words.shape[0] * 2 // 3
        return _planes(words[:split], 2) + _planes(words[split:], 1)
    step = min(bits, 2)
    mask, one = (0x03030303, 0x3C3C3C3C) if step == 2 else (0x02020202, 0x3C3C3C3C)
    made = []
    for k in range(0, bits, 2):
        parts = []
        for j in range(8 // bits):
            shift = bits * j + k - (step == 1)
            moved = lax.shift_right_logical(words, shift) if shift > 0 else words << -shift
            parts.append(pltpu.bitcast(moved & mask | one, jnp.float8_e5m2))
        made.append(jnp.concatenate(parts, 0))
    return made


def _compute(shape: _Shape, refs: _Refs, before: _Item, now: _Item, g: Any) -> None:
    """Scores of an item beside probabilities and output of the one before it, tile by tile: the
    matrix unit works in the order of the program."""
    tiles, run = shape.blocks.tiles, 1 if shape.format.column else RUN
    score, close_scores = _score_stage(shape, refs, now, g)
    output, close_output = _output_stage(shape, refs, before, g - 1)
    old = []
    for i in range(tiles + LAG):
        if i < tiles:
            old.append(refs.scores[i])
            refs.scores[i] = score(i)
        done = range(max(0, i - LAG), min(i - LAG + run, tiles))
        if i >= LAG and (i - LAG) % run == 0:
            output(done, old[done.start : done.stop])
    close_scores()
    close_output()


def _score_stage(
    shape: _Shape, refs: _Refs, item: _Item, g: Any
) -> tuple[Callable[[int], Array], Callable[[], None]]:
    """What gives a tile's scores in units of log 2, −inf where nothing is, and what closes."""
    left = _left(shape, refs, item)
    key = _side(shape, refs, "key", g, left)
    query = refs.query[_row(shape, item) * shape.pairs + item.pair]
    cap = shape.scoring.softcap
    query = query * (shape.scoring.scale * (LOG2E if cap is None else 1 / cap))
    apart = [query]
    if shape.blocks.heads == 2:
        zero = jnp.zeros_like(query)
        apart = [_by_head(shape, [query, zero]), _by_head(shape, [zero, query])]
    bias = refs.buffers["key", "bias"].at[g % BUFFERS] if shape.bias_rows else None
    lane = lax.broadcasted_iota(jnp.int32, (shape.rows, shape.format.tile), 1)
    tops = []

    def score(i: int) -> Array:
        found = _scores(shape, apart, key, bias, i)
        tops.append(jnp.where(lane < left - i * shape.format.tile, found, -jnp.inf))
        return tops[-1]

    def close() -> None:
        refs.tile_top[...] = functools.reduce(jnp.maximum, tops)

    return score, close


def _scores(shape: _Shape, apart: list[Array], key: _Side, bias: Any, i: int) -> Array:
    """Scores of tile i, [rows,C]; apart: the query of each head, zeros in the others' rows."""
    heads, cap = range(shape.blocks.heads), shape.scoring.softcap
    scaled = [_round(q * key.scale[h, i : i + 1, :]) for h, q in enumerate(apart)]
    plain = functools.reduce(jnp.add, [
        q * key.zero[h, i : i + 1, :] - _offset(scaled[h], key.bits) for h, q in enumerate(apart)
    ])  # fmt: skip
    planes = [_planes(key.codes[h, i], key.bits) for h in heads]
    score = jnp.sum(plain, axis=1, keepdims=True) + _dot(
        jnp.concatenate([_weighted(q, key.bits) for q in scaled], 1),
        jnp.concatenate([x for head in planes for x in head], 0),
    )
    if key.column is not None:
        score *= _by_head(shape, [key.column[h, i : i + 1, :] for h in heads])
    if cap is not None:
        score = jnp.tanh(score) * (cap * LOG2E)
    if bias is not None:
        part = bias[:, i * shape.format.tile : (i + 1) * shape.format.tile]
        score += bias_rows(part, shape.rows, shape.tokens) * LOG2E
    return score


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a.astype(jnp.bfloat16), b, preferred_element_type=jnp.float32)


def _values(shape: _Shape, value: _Side, i: int) -> list[Array]:
    """Planes of tile i, [C,P·D] e5m2 each."""
    planes = [
        _planes(value.codes[h, i], value.bits) for h in range(shape.blocks.heads)
    ]
    return [jnp.concatenate(both, 1) for both in zip(*planes, strict=True)]


def _output_stage(
    shape: _Shape, refs: _Refs, item: _Item, g: Any
) -> tuple[Callable[[range, list[Array]], None], Callable[[], None]]:
    """What takes a tile's scores to the output, and what adds all to the row's earlier items."""
    value = _side(shape, refs, "value", g, _left(shape, refs, item))
    fresh = item.step == refs.begin[item.group]
    before = jnp.where(fresh, FLOOR, refs.top[:, :1])
    top = jnp.maximum(jnp.max(refs.tile_top[...], axis=1, keepdims=True), before)
    keep = jnp.where(fresh, 0.0, jnp.exp2(before - top))
    old_total, old_sum = refs.total[:, :1], refs.sum[...]
    parts: list[_Part] = []

    def output(tiles: range, scores: list[Array]) -> None:
        parts.append(_output(shape, value, tiles, [jnp.exp2(x - top) for x in scores]))

    def close() -> None:
        p, plain, out = (functools.reduce(jnp.add, x) for x in zip(*parts, strict=True))
        if value.column is None:
            out += jnp.sum(plain, axis=1, keepdims=True)
        total = jnp.where(fresh, 0.0, keep * old_total) + jnp.sum(p, axis=1, keepdims=True)
        refs.top[...] = jnp.broadcast_to(top, refs.top.shape)
        refs.total[...] = jnp.broadcast_to(total, refs.total.shape)
        refs.sum[...] = jnp.where(fresh, 0.0, keep * old_sum) + out

    return output, close


def _finish(shape: _Shape, refs: _Refs, item: _Item, first_row: Any) -> None:
    """Writes the row of an item: right after the row's last one, too early before. At every
    step, for a branch would cost more."""
    at = item.group * shape.pairs + item.pair - first_row
    total = refs.total[...]
    share = jnp.where(total > 0, total, 1.0)
    lse = (refs.top[...] + jnp.log2(share)) / LOG2E
    refs.lse[at] = jnp.where(total > 0, lse, -jnp.inf)
    refs.out[at] = _own(shape, refs.sum[...]) / share[:, :1]


class _Part(NamedTuple):
    p: Array  # [rows,C]
    plain: Array  # p·z, [rows,C]
    out: Array  # [rows,P·D]


def _output(shape: _Shape, value: _Side, tiles: range, ps: list[Array]) -> _Part:
    """A few tiles' part in the output; Σ p·z is in it only where there is a column factor."""
    heads = range(shape.blocks.heads)

    def times(rows: Any) -> list[Array]:
        each = [_by_head(shape, [rows[h, i : i + 1, :] for h in heads]) for i in tiles]
        return [p * row for p, row in zip(ps, each, strict=True)]

    scaled = [_round(x) for x in times(value.scale)]
    plain = [
        x - _offset(y, value.bits) for x, y in zip(times(value.zero), scaled, strict=True)
    ]
    total, zeros = (functools.reduce(jnp.add, x) for x in (ps, plain))
    out = _dot(
        jnp.concatenate([_weighted(x, value.bits) for x in scaled], 1),
        jnp.concatenate([x for i in tiles for x in _values(shape, value, i)], 0),
    )
    if value.column is not None:
        (i,) = tiles
        out += jnp.sum(zeros, axis=1, keepdims=True)
        out *= jnp.concatenate([value.column[h, i : i + 1, :] for h in heads], 1)
    return _Part(total, zeros, out)
