"""The TPU kernel: a tile is read once, encoded in vector registers and VMEM, and written once.

A grid step takes a few tiles. The rotation is one matrix product with a Hadamard matrix built on
the spot (for keys contracted so that channels come out as rows), packing another one with powers
of two, whose sums of up to 16 bits float32 holds exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops import packing
from kvjax.ops.affine import Tile
from kvjax.ops.encode_tile.blocks import Blocks, largest_divisor
from kvjax.ops.encode_tile.heed import DAMPING, Heed
from kvjax.ops.encode_tile.reference import Kvarn, balance, tile_std

F32, I32 = jnp.float32, jnp.int32
TILES = 4  # of KVarN a grid step
GROUP = 8  # rows of a register: Heed's channels between two matrix products
HEED_WORK = 8 * 128 * 128  # numbers a grid step: all kv heads of a usual layer
LARGEST_TILE, LARGEST_DIM = 256 * 256, 512
SMALLEST = 113 << 23  # the bits of 2^-14, float16's smallest normal number


def refusal(x: jax.Array) -> str:
    """Why no kernel here can take tiles x [..., C, D]; "" if they can."""
    tokens, dim = x.shape[-2:]
    if x.size == 0:
        return "there is no tile"
    if tokens % GROUP or dim % GROUP:
        return f"tiles of {tokens} tokens and head_dim={dim} are no whole registers of 8 rows"
    if tokens * dim > LARGEST_TILE or dim > LARGEST_DIM:
        return f"a tile of {tokens} tokens of head_dim={dim} is too large for the vector memory"
    return ""


def kvarn_refusal(x: jax.Array, options: Kvarn) -> str:
    """Why the kernel cannot take these arguments; "" if it can."""
    if options.clip:
        return "clip needs the quantiles of rows, which the kernel does not sort"
    if options.scale_bits != 16:
        return f"scale_bits={options.scale_bits} is the reference's alone"
    return refusal(x)


def kvarn_tile(
    x: jax.Array, role: str, options: Kvarn, blocks: Blocks | None = None, interpret: Any = False
) -> Tile:
    """`reference.kvarn_tile` in one kernel; x [..., C, D]."""
    total = math.prod(x.shape[:-2])
    blocks = blocks or Blocks(largest_divisor(total, TILES))
    shapes = _shapes(x, role, options.bits)
    shapes["column"] = (1, shapes["codes"][1] // 2)
    body = partial(_kvarn, role=role, options=options)
    return _encode(body, f"encode_{role}_kvarn", [x], shapes, [], blocks, interpret)


def _shapes(x: jax.Array, role: str, bits: int) -> dict[str, tuple[int, int]]:
    """The leaves of one tile, vectors as one row."""
    tokens, dim = x.shape[-2:]
    rows, minor = (dim, tokens) if role == "key" else (tokens, dim)
    return {"codes": (packing.words(rows, bits), minor), "affine": (1, rows)}


def _encode(
    body: Callable[..., None],
    name: str,
    inputs: list[jax.Array],
    shapes: dict[str, tuple[int, int]],
    scratch: list[Any],
    blocks: Blocks,
    interpret: Any,
) -> Tile:
    """Calls a kernel over inputs [..., a, b], whose leading axes are tiles, for int32 leaves."""
    lead = inputs[0].shape[:-2]
    total, tiles = math.prod(lead), blocks.tiles
    blocks.check(total)
    out = pl.pallas_call(
        body,
        grid=(total // tiles,),
        in_specs=[_block(tiles, *array.shape[-2:]) for array in inputs],
        out_specs=[_block(tiles, *shape) for shape in shapes.values()],
        out_shape=[jax.ShapeDtypeStruct((total, *shape), I32) for shape in shapes.values()],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=name,
    )(*(array.reshape(total, *array.shape[-2:]) for array in inputs))
    tile = dict(zip(shapes, out, strict=True))
    return {
        n: leaf.reshape(*lead, *(leaf.shape[1:] if n == "codes" else leaf.shape[2:]))
        for n, leaf in tile.items()
    }


def _block(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda i: (i, 0, 0))


def _kvarn(
    x_ref: Any, codes_ref: Any, affine_ref: Any, column_ref: Any, *, role: str, options: Kvarn
) -> None:
    # x [n,C,D]; codes [n,W,M], affine [n,1,R], column [n,1,M/2] int32
    tiles = range(x_ref.shape[0])
    rows = jnp.stack([_rows(x_ref[i], role, options.rotate) for i in tiles])
    size = tile_std(rows) if options.normalize_tile else jnp.ones((), F32)
    rows = rows / size
    row_scale, column_scale = balance(rows, options.iterations)
    codes, scale, zero = _quantize(rows / column_scale / row_scale, options.bits)
    row_scale = row_scale * size
    affine = _pair(scale * row_scale, zero * row_scale, options.meta_dtype)
    half = column_scale.shape[-1] // 2
    column = _pair(column_scale[..., :half], column_scale[..., half:], options.meta_dtype)
    for i in tiles:
        codes_ref[i] = _pack(codes[i], options.bits)
        affine_ref[i] = _as_lanes(affine[i])
        column_ref[i] = column[i]


def _rows(x: jax.Array, role: str, rotate: bool) -> jax.Array:
    """x [C,D] as float32 rows [R,M], rotated."""
    x = x.astype(F32)
    if not rotate:
        return x.T if role == "key" else x
    matrix = _hadamard(x.shape[-1])
    left, right = (matrix, x) if role == "key" else (x, matrix)
    return lax.dot_general(
        left, right, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST,
        preferred_element_type=F32,
    )  # fmt: skip


def _hadamard(dim: int) -> jax.Array:
    """`kvjax.ops.hadamard.hadamard_matrix`."""
    shared = _iota((dim, dim), 0) & _iota((dim, dim), 1)
    odd = lax.population_count(shared) & 1
    return jnp.where(odd == 1, -(dim**-0.5), dim**-0.5).astype(F32)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(I32, shape, axis)


def _quantize(rows: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`kvjax.ops.rounding.quantize_rows`, with codes as float32."""
    levels = F32(2**bits - 1)
    zero = rows.min(axis=-1, keepdims=True)
    scale = jnp.maximum((rows.max(axis=-1, keepdims=True) - zero) / levels, 1e-10)
    codes = jnp.clip(jnp.round((rows - zero) / scale), 0, levels)
    return codes, scale, zero


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """`kvjax.ops.packing.pack` of float32 codes [R,M]; int32 [W,M]."""
    if bits == 3:
        high = jnp.floor(codes * 0.25)
        return jnp.concatenate([_pack(codes - 4 * high, 2), _pack(high, 1)], axis=0)
    words = packing.words(codes.shape[0], bits)
    low, high = (_pack_halves(codes, bits, words, half) for half in (0, 1))
    return low.astype(I32) | (high.astype(I32) << 16)


def _pack_halves(codes: jax.Array, bits: int, words: int, half: int) -> jax.Array:
    """The lower or upper 16 bits of every word, as whole numbers in float32 [W,M]."""
    word, row = _iota((words, codes.shape[0]), 0), _iota((words, codes.shape[0]), 1)
    byte = row % 4 - 2 * half
    shift = 8 * byte + bits * (row // (4 * words))
    mine = (row // 4 % words == word) & (byte >= 0) & (byte < 2)
    powers = jnp.where(mine, 1 << jnp.where(mine, shift, 0), 0).astype(F32)
    return jnp.dot(
        powers.astype(jnp.bfloat16), codes.astype(jnp.bfloat16), preferred_element_type=F32
    )


def _as_lanes(column: jax.Array) -> jax.Array:
    """int32 [R,1] as [1,R]."""
    shape = (column.shape[0],) * 2
    diagonal = _iota(shape, 0) == _iota(shape, 1)
    return jnp.sum(jnp.where(diagonal, column, 0), axis=0, keepdims=True)


def _pair(high: jax.Array, low: jax.Array, meta_dtype: str) -> jax.Array:
    """`kvjax.ops.packing.pack_pair`."""
    return (_to_bits(high, meta_dtype) << 16) | _to_bits(low, meta_dtype)


def _to_bits(x: jax.Array, meta_dtype: str) -> jax.Array:
    """float32 to the bits of a 16-bit float, in the lower half of an int32."""
    bits = lax.bitcast_convert_type(_rounded(x, meta_dtype), I32)
    if meta_dtype == "bfloat16":
        return lax.shift_right_logical(bits, 16)
    sign, size = lax.shift_right_logical(bits, 16) & 0x8000, bits & 0x7FFFFFFF
    small = lax.bitcast_convert_type(size, F32) * 2.0**24
    return sign | jnp.where(size < SMALLEST, small.astype(I32), (size - (112 << 23)) >> 13)


def _rounded(x: jax.Array, meta_dtype: str) -> jax.Array:
    """float32 rounded to a 16-bit float: ties to even, what is too large clipped. Not every TPU
    converts to float16, so it is done on the bits."""
    limit = float(jnp.finfo(meta_dtype).max)
    bits = lax.bitcast_convert_type(jnp.clip(x, -limit, limit), I32)
    dropped = 16 if meta_dtype == "bfloat16" else 13
    even = lax.shift_right_logical(bits, dropped) & 1
    bits = (bits + ((1 << (dropped - 1)) - 1) + even) & -(1 << dropped)
    if meta_dtype == "bfloat16":
        return lax.bitcast_convert_type(bits, F32)
    # Below 2^-14 float16 counts in steps of 2^-24, which are those of float32 from 0.5 on. The
    # maximum changes nothing: without it a compiler may leave out + 0.5 - 0.5.
    small = lax.bitcast_convert_type(jnp.maximum(jnp.abs(x) + 0.5, 0.5) - 0.5, I32)
    small = small | (bits & -(1 << 31))
    return lax.bitcast_convert_type(jnp.where(jnp.abs(x) < 2.0**-14, small, bits), F32)


# Heed. Rows are fitted in turn, and a row is hardly any work: the tiles of a grid step go hand in
# hand, one tile a sublane, and what is stored tile by tile is turned to that by strided stores.


def heed_tile(
    x: jax.Array,
    role: str,
    options: Heed,
    query: jax.Array | None,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> Tile:
    """`heed.heed_tile` in one kernel, but for the sum of q qᵀ, which is XLA's; x [..., C, D]."""
    tokens, dim = x.shape[-2:]
    total = math.prod(x.shape[:-2])
    blocks = blocks or Blocks(largest_divisor(total, max(1, HEED_WORK // (max(tokens, dim) * dim))))
    inputs, scratch = [x], []
    body: Callable[..., None] = _fit_tiles
    if role == "value" and options.feedback and options.coupling:
        body, shape = _values_in_turn, (tokens, blocks.tiles, dim)
        scratch = [pltpu.VMEM(shape, dtype) for dtype in (F32, F32, I32)]
    elif role == "key" and options.feedback and query is not None:
        body, scratch = _keys_in_turn, _key_scratch(blocks.tiles, tokens, dim)
        inputs.append(query_power(query))
    body = partial(body, role=role, options=options)
    shapes = _shapes(x, role, options.bits)
    return _encode(body, f"encode_{role}_heed", inputs, shapes, scratch, blocks, interpret)


def query_power(query: jax.Array) -> jax.Array:
    """Σ q qᵀ float32 [..., D, D] of query [..., n, D], not rotated. Products of bfloat16 are exact
    in float32."""
    exact = None if query.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    return jnp.einsum(
        "...nd,...ne->...de", query, query, precision=exact, preferred_element_type=F32
    )


def _fit_tiles(x_ref: Any, codes_ref: Any, affine_ref: Any, *, role: str, options: Heed) -> None:
    # x [n,C,D]; codes [n,W,M], affine [n,1,R] int32
    tiles = range(x_ref.shape[0])
    rows = jnp.stack([_rows(x_ref[i], role, True) for i in tiles])
    codes, scale, zero = _fit_row(rows, options)
    affine = _pair(scale, zero, options.meta_dtype)
    for i in tiles:
        codes_ref[i] = _pack(codes[i], options.bits)
        affine_ref[i] = _as_lanes(affine[i])


def _fit_row(row: jax.Array, options: Heed) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`heed.fit_row` of [..., M]: codes as float32, and scale and zero [..., 1] as stored."""
    low, high = row.min(axis=-1, keepdims=True), row.max(axis=-1, keepdims=True)
    middle, half = (low + high) / 2, (high - low) / 2
    found = []
    for clip in options.clips:
        step = jnp.maximum(2 * half * clip / (2**options.bits - 1), 1e-10)
        codes, scale, zero = _round_and_fit(row, step, middle - half * clip, middle, options)
        error = row - (codes * scale + zero)
        found.append(((error * error).sum(axis=-1, keepdims=True), codes, scale, zero))
    error, *best = found[0]
    for new_error, *new in found[1:]:
        better = new_error < error
        error = jnp.where(better, new_error, error)
        best = [jnp.where(better, a, b) for a, b in zip(new, best, strict=True)]
    codes, scale, zero = best
    return codes, scale, zero


def _refit_row(
    row: jax.Array, scale: jax.Array, zero: jax.Array, options: Heed
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`heed.refit_row` of [..., M]."""
    scale = jnp.where(jnp.abs(scale) > 1e-10, scale, 1e-10)
    middle = zero + (2**options.bits - 1) / 2 * scale
    return _round_and_fit(row, scale, zero, middle, options)


def _round_and_fit(
    row: jax.Array, scale: jax.Array, zero: jax.Array, middle: jax.Array, options: Heed
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`heed.round_and_fit`, all of whose sums are taken at once: what a row costs is the time a
    sum takes to arrive. Row and codes are taken about the middle of their range."""
    half = (2**options.bits - 1) / 2
    codes = jnp.clip(jnp.round((row - zero) * (1 / scale)), 0, 2 * half)
    row, apart = row - middle, codes - half
    mean, center = apart.mean(axis=-1, keepdims=True), row.mean(axis=-1, keepdims=True)
    count = row.shape[-1]
    power = (apart * apart).sum(axis=-1, keepdims=True) - count * mean * mean
    slope = (apart * row).sum(axis=-1, keepdims=True) - count * mean * center
    # One code less than all the others makes it 1 - 1/count.
    scale = jnp.where(power > 0.5, slope / jnp.maximum(power, 0.5), scale)
    zero = _rounded(middle + center - scale * (mean + half), options.meta_dtype)
    return codes, _rounded(scale, options.meta_dtype), zero


def _values_in_turn(
    x_ref: Any, codes_ref: Any, affine_ref: Any, rows_ref: Any, code_ref: Any, meta_ref: Any,
    *, role: str, options: Heed,
) -> None:  # fmt: skip
    # x [n,C,D]; codes [n,W,D], affine [n,1,C] int32; scratch [C,n,D]: a token of all tiles
    tiles, tokens, dim = x_ref.shape
    rows = [_rows(x_ref[i], role, True) for i in range(tiles)]
    for i in range(tiles):
        rows_ref[:, i, :] = rows[i]

    def one(t: jax.Array, total: jax.Array) -> jax.Array:
        left = (tokens - jnp.full((1, 1), t)).astype(F32)
        share = options.coupling / (1 + options.coupling * left)
        row = rows_ref[t]
        ranged = row.max(axis=-1, keepdims=True) > row.min(axis=-1, keepdims=True)
        codes, scale, zero = _fit_row(row + jnp.where(ranged, share * total, 0.0), options)
        code_ref[t] = codes
        meta_ref[t] = jnp.broadcast_to(_pair(scale, zero, options.meta_dtype), row.shape)
        return total + (row - (codes * scale + zero))

    lax.fori_loop(0, tokens, one, jnp.zeros((tiles, dim), F32))
    for i in range(tiles):
        codes_ref[i] = _pack(code_ref[:, i, :], options.bits)
        affine_ref[i] = _as_lanes(meta_ref[:, i, :][:, :1])


def _key_scratch(tiles: int, tokens: int, dim: int) -> list[Any]:
    """What `_keys_in_turn` keeps in vector memory, in the order of its arguments."""
    square, rows = (tiles, dim, dim), (tiles, dim, tokens)
    channels, turned = (dim, tiles, tokens), (GROUP, tiles, tokens)
    shapes = [
        square, square, square, (tiles, 1, dim), rows, rows, channels, channels, channels,
        turned, turned, turned, (GROUP - 1, *turned),
    ]  # fmt: skip
    return [pltpu.VMEM(shape, F32) for shape in shapes]


def _keys_in_turn(
    x_ref: Any, power_ref: Any, codes_ref: Any, affine_ref: Any, c_ref: Any, f_ref: Any,
    pull_ref: Any, rank_ref: Any, rows_ref: Any, errors_ref: Any, code_ref: Any, scale_ref: Any,
    zero_ref: Any, row_ref: Any, target_ref: Any, turn_ref: Any, weight_ref: Any,
    *, role: str, options: Heed,
) -> None:  # fmt: skip
    # x [n,C,D], power [n,D,D]; codes [n,W,C], affine [n,1,D] int32
    tiles, tokens, dim = x_ref.shape
    groups = dim // GROUP
    for i in range(tiles):
        rows = _rows(x_ref[i], role, True)
        rank_ref[i], order = _order(_score_power(power_ref[i], rows, options), c_ref, pull_ref, i)
        rows_ref[i] = _dot(order, rows)
    errors_ref[...] = jnp.zeros(errors_ref.shape, F32)
    lax.fori_loop(0, groups, partial(_factor, c_ref, f_ref), None)

    def group(turn: jax.Array, _: None, again: bool) -> None:
        first = pl.multiple_of(lax.rem(turn, groups) * GROUP, GROUP)
        _targets(
            first, pull_ref if again else f_ref, rows_ref, errors_ref, row_ref, target_ref,
            turn_ref, weight_ref,
        )  # fmt: skip
        changes: list[jax.Array] = []
        for k in range(GROUP):
            target, channel = target_ref[k], first + k
            for j in range(k):
                target = target + weight_ref[j, k] * changes[j]
            if again:
                codes, scale, zero = _refit_row(
                    target, scale_ref[channel], zero_ref[channel], options
                )
            else:
                codes, scale, zero = _fit_row(target, options)
            error = row_ref[k] - (codes * scale + zero)
            changes.append(error - turn_ref[k])
            turn_ref[k], code_ref[channel] = error, codes
            scale_ref[channel] = jnp.broadcast_to(scale, codes.shape)
            zero_ref[channel] = jnp.broadcast_to(zero, codes.shape)
        for i in range(tiles):
            errors_ref[i, pl.ds(first, GROUP), :] = turn_ref[:, i, :]

    lax.fori_loop(0, groups, partial(group, again=False), None)
    lax.fori_loop(0, options.sweeps * groups, partial(group, again=True), None)
    for i in range(tiles):
        order = rank_ref[i] == _iota((dim, dim), 0).astype(F32)
        codes = lax.dot_general(
            order.astype(F32).astype(jnp.bfloat16), code_ref[:, i, :].astype(jnp.bfloat16),
            (((0,), (0,)), ((), ())), preferred_element_type=F32,
        )  # fmt: skip
        codes_ref[i] = _pack(codes, options.bits)
        meta = _pair(scale_ref[:, i, :][:, :1], zero_ref[:, i, :][:, :1], options.meta_dtype)
        affine_ref[i] = jnp.sum(jnp.where(order, meta, 0), axis=0, keepdims=True)


def _score_power(power: jax.Array, rows: jax.Array, options: Heed) -> jax.Array:
    """`heed.score_power` of rows [D,C] and the unrotated queries' Σ q qᵀ [D,D]."""
    matrix, eye = _hadamard(rows.shape[0]), _eye(rows.shape[0])
    keys = rows - rows.mean(axis=-1, keepdims=True)
    mixed = jnp.where(eye, DAMPING, 0.0)
    moments = _dot(_dot(matrix, power), matrix), _dot(keys, keys, 1, 1)
    for share, moment in zip((1 - options.own_share, options.own_share), moments, strict=True):
        total = jnp.sum(jnp.where(eye, moment, 0.0), axis=(0, 1), keepdims=True)
        mixed = mixed + moment * (share / jnp.maximum(total / eye.shape[0], 1e-30))
    return mixed


def _eye(dim: int) -> jax.Array:
    return _iota((dim, dim), 0) == _iota((dim, dim), 1)


def _order(power: jax.Array, c_ref: Any, pull_ref: Any, tile: int) -> tuple[jax.Array, jax.Array]:
    """Each channel's place by falling C_ii, float32 [1,D], and the permutation [D,D] that puts
    channels there. Writes C in that order, and C_ij / C_ii without its diagonal."""
    dim = power.shape[0]
    eye = _eye(dim)
    diagonal = jnp.where(eye, power, 0.0)
    column, row = (jnp.sum(diagonal, axis=axis, keepdims=True) for axis in (1, 0))
    ahead = (column > row) | ((column == row) & (_iota((dim, dim), 0) < _iota((dim, dim), 1)))
    rank = jnp.sum(jnp.where(ahead, 1.0, 0.0), axis=0, keepdims=True)
    order = jnp.where(rank == _iota((dim, dim), 0).astype(F32), 1.0, 0.0)
    power = _dot(_dot(order, power), order, 1, 1)
    c_ref[tile] = power
    own = jnp.sum(jnp.where(eye, power, 0.0), axis=1, keepdims=True)
    pull_ref[tile] = jnp.where(eye, 0.0, power / own)
    return rank, order


def _dot(left: jax.Array, right: jax.Array, axis: int = 1, other: int = 0) -> jax.Array:
    return lax.dot_general(
        left, right, (((axis,), (other,)), ((), ())), precision=lax.Precision.HIGHEST,
        preferred_element_type=F32,
    )  # fmt: skip


def _factor(c_ref: Any, f_ref: Any, step: jax.Array, _: None) -> None:
    """Eliminates the last `GROUP` channels still in C [n,D,D], and writes their weights: row i of
    f holds F_ji for the channels j before i, zero for the others.

    C without the channels after i is their Schur complement, and its row i over its C_ii is F's
    column.
    """
    tiles, dim, _ = c_ref.shape
    first = pl.multiple_of(dim - GROUP - step * GROUP, GROUP)
    lane, row = _iota((1, GROUP, dim), 2), _iota((1, GROUP, dim), 1)
    panel = c_ref[:, pl.ds(first, GROUP), :]
    weights = jnp.zeros_like(panel)
    for k in reversed(range(GROUP)):
        column = jnp.sum(jnp.where(lane == first + k, panel, 0.0), axis=2, keepdims=True)
        weight = panel[:, k : k + 1] / column[:, k : k + 1]
        weight = jnp.where(lane[:, :1] < first + k, weight, 0.0)
        weights = jnp.where(row == k, weight, weights)
        panel = jnp.where(row < k, panel - column * weight, panel)
    f_ref[:, pl.ds(first, GROUP), :] = weights
    panel = jnp.where(lane < first, panel, 0.0)
    update = [_dot(panel[i], weights[i], 0, 0) for i in range(tiles)]
    for i in range(tiles):
        c_ref[i] = c_ref[i] - update[i]


def _targets(
    first: jax.Array, weights_ref: Any, rows_ref: Any, errors_ref: Any, row_ref: Any,
    target_ref: Any, turn_ref: Any, weight_ref: Any,
) -> None:  # fmt: skip
    """Rows of a group of channels, their targets by the errors as they stand, these errors, and the
    weights on each other, turned so that a channel's rows of all tiles are one block."""
    tiles, _, tokens = rows_ref.shape
    at = pl.ds(first, GROUP)
    weights, rows, errors = (ref[:, at, :] for ref in (weights_ref, rows_ref, errors_ref))
    lane = _iota((1, *weights.shape[1:]), 2)
    push = [_dot(weights[i], errors_ref[i]) for i in range(tiles)]
    columns = [
        jnp.sum(jnp.where(lane == first + j, weights, 0.0), axis=2, keepdims=True)
        for j in range(GROUP - 1)
    ]
    for i in range(tiles):
        row_ref[:, i, :], target_ref[:, i, :] = rows[i], rows[i] + push[i]
        turn_ref[:, i, :] = errors[i]
        for j in range(GROUP - 1):
            weight_ref[j, :, i, :] = jnp.broadcast_to(columns[j][i], (GROUP, tokens))
