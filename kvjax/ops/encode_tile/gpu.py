"""The kernels for GPUs (Mosaic GPU, Hopper): a block of threads reads a tile once, encodes it in
shared memory, and writes it once.

The rotation is one warpgroup product with Hadamard's signs (the identity where nothing is rotated);
products of 16-bit numbers and signs are exact. From then on the tile lies in shared memory in
float32. Where rows are summed a thread keeps a row of it, where columns are summed a column, so
these sums cross no threads; what does are the scales, over shared memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.ops import hadamard, packing
from kvjax.ops.affine import Tile
from kvjax.ops.encode_tile.heed import Heed, order_and_factor, score_power
from kvjax.ops.encode_tile.reference import LOG_SCALE_RANGE, STD_RANGE, Kvarn
from kvjax.ops.mosaic_gpu import (
    COMPILER,
    F32,
    I32,
    TILED,
    WG,
    device_refusal,
    full,
    load,
    products,
    spread,
    store,
    tiled,
)
from kvjax.ops.rounding import as_rows, divide

PART = 32  # columns, or rows, that a thread reads before it sums them
PAD = 8  # numbers between two rows of shared memory: a product is then stored without conflicts
SWIZZLE = 64  # 16-bit numbers, 128 bytes: the widest
CHOICES = 8  # a multiple of 4 warps that holds Heed's five clipped ranges
# Loads and stores of shared memory wait for each other by themselves.
SAFE = dataclasses.replace(COMPILER, unsafe_no_auto_barriers=False)
Shapes = dict[str, tuple[int, ...]]


def refusal(x: Array) -> str:
    """Why no kernel here can take tiles x [..., C, D]; "" if they can."""
    tokens, dim = x.shape[-2:]
    if x.size == 0:
        return "there is no tile"
    if tokens != 128 or dim not in (64, 128):
        return f"tiles must have 128 tokens of head_dim 64 or 128, not {tokens} of {dim}"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"entries must be bfloat16 or float16, not {x.dtype}"
    return device_refusal()


def kvarn_refusal(x: Array, options: Kvarn) -> str:
    """Why the kernel cannot take these arguments; "" if it can."""
    if options.clip:
        return "clip needs the quantiles of rows, which the kernel does not sort"
    if options.scale_bits != 16:
        return f"scale_bits={options.scale_bits} is the reference's alone"
    if options.normalize_tile:
        return "normalize_tile is the reference's alone"
    return refusal(x)


class _Walk(NamedTuple):
    """What a block of threads is compiled for: tiles of R rows of M numbers."""

    rows: int
    minor: int
    by_key: bool
    options: Any  # Kvarn or Heed
    interpret: Any

    @property
    def levels(self) -> float:
        return float(2**self.options.bits - 1)


def _walk(x: Array, role: str, options: Kvarn | Heed, interpret: Any) -> _Walk:
    tokens, dim = x.shape[-2:]
    rows, minor = (dim, tokens) if role == "key" else (tokens, dim)
    return _Walk(rows, minor, role == "key", options, interpret)


def _encode(
    body: Callable[..., None], walk: _Walk, rotate: bool, leaves: Shapes, scratch: dict[str, Any],
    x: Array, *more: Array,
) -> Tile:  # fmt: skip
    """Calls a kernel for the int32 `leaves` of each tile of x [..., C, D], of which it reads `more`
    too."""
    lead, (tokens, dim) = x.shape[:-2], x.shape[-2:]
    total = math.prod(lead)
    signs = jnp.sign(hadamard.hadamard_matrix(dim)) if rotate else jnp.eye(dim)
    shared = {
        **{f"out_{name}": plgpu.SMEM(shape, I32) for name, shape in leaves.items()},
        **scratch,
        "loaded": plgpu.Barrier(),
    }
    out = plgpu.kernel(
        partial(body, walk),
        out_type=[jax.ShapeDtypeStruct((total, *shape), I32) for shape in leaves.values()],
        grid=(total,),
        grid_names=("tile",),
        scratch_types={"shared": shared},
        compiler_params=SAFE,
        interpret=walk.interpret or None,
    )(
        x.reshape(total, tokens, dim),
        signs.astype(x.dtype),
        *(y.reshape(total, *y.shape[len(lead) :]) for y in more),
    )
    return {n: leaf.reshape(*lead, *leaf.shape[1:]) for n, leaf in zip(leaves, out, strict=True)}


def _write_out(shared: Any, targets: dict[str, Any]) -> None:
    plgpu.commit_smem()
    for name, target in targets.items():
        plgpu.copy_smem_to_gmem(shared[f"out_{name}"], target.at[lax.axis_index("tile")])
    plgpu.wait_smem_to_gmem(0)


def _rotate(walk: _Walk, x_ref: Any, signs_ref: Any, shared: Any, factor: float) -> None:
    """Writes the rows [R,M] of x [C,D] @ signs [D,D], times `factor`."""
    left, right = (signs_ref, x_ref) if walk.by_key else (x_ref, signs_ref)

    def body(operand: Any) -> None:
        _fetch(right, operand, shared)
        (made,) = products(
            [[(load(left, WG), operand)]], walk.rows, walk.minor, bool(walk.interpret)
        )
        rows = shared["rows"].at[:, pl.ds(0, walk.minor)]
        store(rows, made * factor)

    pl.run_scoped(body, plgpu.SMEM(right.shape, right.dtype, transforms=tiled(SWIZZLE)))


def _own(count: int) -> Any:
    """[count]: a thread keeps a number; of 64 or 32, two or four threads do."""
    warps = count // 32
    dims = {1: (plgpu.Replicated(4),), 2: (-3, plgpu.Replicated(2)), 4: (-3,)}[warps]
    tiles = ((count,), (32,), (1,)) if warps > 1 else ((32,), (1,))
    return TILED(plgpu.Tiling(tiles), warp_dims=dims, lane_dims=(-2,), vector_dim=-1)


def _by_row(rows: int) -> Any:
    """[rows, 4n]: a thread keeps what `_own` says of the first axis."""
    warps = (-4,) if rows == 128 else (-4, plgpu.Replicated(2))
    tiling = plgpu.Tiling(((rows, 4), (32, 4)))
    return TILED(tiling, warp_dims=warps, lane_dims=(-2,), vector_dim=-1)


def _by_column(columns: int) -> Any:
    """[n, columns]: a thread keeps what `_own` says of the second axis."""
    warps = (-3,) if columns == 128 else (-3, plgpu.Replicated(2))
    tiling = plgpu.Tiling(((1, columns), (32,), (1,)))
    return TILED(tiling, warp_dims=warps, lane_dims=(-2,), vector_dim=-1)


def _pair(high: Array, low: Array, meta_dtype: str) -> Array:
    """`kvjax.ops.packing.pack_pair`."""
    return (_to_bits(high, meta_dtype) << 16) | _to_bits(low, meta_dtype)


def _to_bits(x: Array, meta_dtype: str) -> Array:
    return lax.bitcast_convert_type(_half(x, meta_dtype), jnp.int16).astype(I32) & 0xFFFF


def _half(x: Array, meta_dtype: str) -> Array:
    """float32 as a 16-bit float; what is too large is clipped."""
    limit = float(jnp.finfo(meta_dtype).max)
    return jnp.minimum(jnp.maximum(x, -limit), limit).astype(meta_dtype)


def _round(steps: Array, levels: float) -> Array:
    return jnp.minimum(jnp.maximum(lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN), 0), levels)


# KVarN.


def kvarn_tile(x: Array, role: str, options: Kvarn, interpret: Any = False) -> Tile:
    """`reference.kvarn_tile` in one kernel; x [..., C, D]."""
    walk = _walk(x, role, options, interpret)
    rows, minor = walk.rows, walk.minor
    leaves: Shapes = {"codes": (packing.words(rows, options.bits), minor)}
    leaves |= {"affine": (rows,), "column": (minor // 2,)}
    shapes = {"rows": (rows, minor + PAD), "by_row": (rows,), "zero": (rows,), "scale": (rows,),
              "by_column": (minor,)}  # fmt: skip
    scratch = {name: plgpu.SMEM(shape, F32) for name, shape in shapes.items()}
    return _encode(_kvarn, walk, options.rotate, leaves, scratch, x)


def _kvarn(
    walk: _Walk, x_ref: Any, signs_ref: Any, codes_ref: Any, affine_ref: Any, column_ref: Any, *,
    shared: Any,
) -> None:  # fmt: skip
    # x [total,C,D]; codes [total,W,M], affine [total,R], column [total,M/2] int32
    options, half = walk.options, walk.minor // 2
    factor = x_ref.shape[-1] ** -0.5 if options.rotate else 1.0
    _rotate(walk, x_ref.at[lax.axis_index("tile")], signs_ref, shared, factor)
    row_log, column_log = _balance(walk, shared)
    shared["by_column"][...] = jnp.exp(column_log)
    high, low = (load(shared["by_column"].at[pl.ds(i, half)], _own(half)) for i in (0, half))
    shared["out_column"][...] = _pair(high, low, options.meta_dtype)

    shared["by_column"][...] = jnp.exp(-column_log)
    shrink, size = jnp.exp(-row_log), jnp.exp(row_log)
    low, top = _row_ends(walk, shared)
    zero, top = low * shrink, top * shrink
    scale = jnp.maximum(divide(top - zero, jnp.float32(walk.levels)), 1e-10)
    shared["by_row"][...], shared["zero"][...], shared["scale"][...] = shrink, zero, scale
    shared["out_affine"][...] = _pair(scale * size, zero * size, options.meta_dtype)
    _pack(walk, shared)
    _write_out(shared, {"codes": codes_ref, "affine": affine_ref, "column": column_ref})


def _balance(walk: _Walk, shared: Any) -> tuple[Array, Array]:
    """Logarithms of `reference.balance`, [R] and [M]. A row's deviation after its division is the
    one before it, divided."""
    of_rows, of_columns = _own(walk.rows), _own(walk.minor)
    row_log, column_log = full((walk.rows,), 0.0, of_rows), full((walk.minor,), 0.0, of_columns)
    shared["by_row"][...], shared["by_column"][...] = row_log + 1.0, column_log + 1.0
    row_std, column_std = _row_std(walk, shared), _column_std(walk, shared)
    best = (_spread(row_std) + _spread(column_std), row_log, column_log)

    def one_round(_: Any, state: Any) -> Any:
        row_log, column_log, column_std, (least, *logs) = state
        column_log = _clip_log(column_log, column_std)
        shared["by_column"][...] = jnp.exp(-column_log)
        row_std = _row_std(walk, shared)
        row_log = _clip_log(row_log, row_std * jnp.exp(-row_log))
        shrink = jnp.exp(-row_log)
        shared["by_row"][...] = shrink
        column_std = _column_std(walk, shared) * jnp.exp(-column_log)
        imbalance = _spread(row_std * shrink) + _spread(column_std)
        better = imbalance <= least
        logs = [jnp.where(better, *x) for x in zip((row_log, column_log), logs, strict=True)]
        return row_log, column_log, column_std, (jnp.where(better, imbalance, least), *logs)

    state = (row_log, column_log, column_std, best)
    _, row_log, column_log = lax.fori_loop(0, walk.options.iterations, one_round, state)[-1]
    return row_log, column_log


def _row_part(walk: _Walk, shared: Any, index: Any) -> Array:
    """Rows [R,PART] under the columns' factors, a thread a row."""
    layout, at = _by_row(walk.rows), pl.ds(index * PART, PART)
    factor = load(shared["by_column"].at[at], layout.reduce(0))
    return load(shared["rows"].at[:, at], layout) * spread(factor, (walk.rows, PART), 1, layout)


def _column_part(walk: _Walk, shared: Any, index: Any) -> Array:
    """Rows [PART,M] under the rows' factors, a thread a column."""
    layout, at = _by_column(walk.minor), pl.ds(index * PART, PART)
    factor = load(shared["by_row"].at[at], layout.reduce(1))
    x = load(shared["rows"].at[at, pl.ds(0, walk.minor)], layout)
    return x * spread(factor, (PART, walk.minor), 0, layout)


def _row_std(walk: _Walk, shared: Any) -> Array:
    part = partial(_row_part, walk, shared)
    return _std(part, 1, walk.minor, full((walk.rows,), 0.0, _own(walk.rows)), _by_row(walk.rows))


def _column_std(walk: _Walk, shared: Any) -> Array:
    zeros = full((walk.minor,), 0.0, _own(walk.minor))
    return _std(partial(_column_part, walk, shared), 0, walk.rows, zeros, _by_column(walk.minor))


def _std(part: Callable[[Any], Array], axis: int, count: int, zeros: Array, layout: Any) -> Array:
    """The standard deviation over the `count` numbers of an axis, read part by part: registers do
    not hold them all."""

    def add(power: Callable[[Array], Array]) -> Array:
        def step(index: Any, total: Array) -> Array:
            return total + power(part(index)).sum(axis=axis)

        return lax.fori_loop(0, count // PART, step, zeros)

    mean = add(lambda x: x) * (1 / count)
    square = add(lambda x: (x - spread(mean, x.shape, 1 - axis, layout)) ** 2)
    return jnp.sqrt(square * (1 / (count - 1)))


def _row_ends(walk: _Walk, shared: Any) -> tuple[Array, Array]:
    """The least and the largest number of each row under the columns' factors."""

    def step(index: Any, ends: Any) -> Any:
        x = _row_part(walk, shared, index)
        return jnp.minimum(ends[0], x.min(axis=1)), jnp.maximum(ends[1], x.max(axis=1))

    ends = [full((walk.rows,), end, _own(walk.rows)) for end in (math.inf, -math.inf)]
    return lax.fori_loop(0, walk.minor // PART, step, tuple(ends))


def _spread(std: Array) -> Array:
    return std.max(axis=0) / jnp.maximum(std.min(axis=0), 1e-8)


def _clip_log(log: Array, std: Array) -> Array:
    (least, most), (low, high) = STD_RANGE, LOG_SCALE_RANGE
    log = log + jnp.log(jnp.minimum(jnp.maximum(std, least), most))
    return jnp.minimum(jnp.maximum(log, low), high)


def _pack(walk: _Walk, shared: Any) -> None:
    """Writes the words of all codes, a thread a column."""
    layout = _own(walk.minor)
    column = load(shared["by_column"], layout)

    def code(row: Array) -> Array:
        x = load(shared["rows"].at[row, pl.ds(0, walk.minor)], layout)
        x = x * column * shared["by_row"][row]
        steps = divide(x - shared["zero"][row], shared["scale"][row])
        return _round(steps, walk.levels).astype(I32)

    for bits, first, count, drop in _fields(walk):

        def word(index: Array, _: Any, bits: int = bits, first: int = first, count: int = count,
                 drop: int = drop) -> None:  # fmt: skip
            made = []
            for plane in range(8 // bits):
                for byte in range(4):
                    some = code(plane * 4 * count + 4 * index + byte) >> drop & (1 << bits) - 1
                    made.append(some << 8 * byte + bits * plane)
            shared["out_codes"].at[first + index][...] = reduce(jnp.bitwise_or, made)

        lax.fori_loop(0, count, word, None)


def _fields(walk: _Walk) -> list[tuple[int, int, int, int]]:
    """(bits, first word, words, how far codes are moved down) of each part that `packing` makes."""
    bits = walk.options.bits
    if bits != 3:
        return [(bits, 0, packing.words(walk.rows, bits), 0)]
    low, high = packing.words(walk.rows, 2), packing.words(walk.rows, 1)
    return [(2, 0, low, 0), (1, low, high, 2)]


# Heed. Rows are fitted in turn. The numbers of a row lie in every warp, four or two of them in a
# thread, so that its sums stay within a warp; of the clipped ranges each warp tries two.


def heed_tile(
    x: Array, role: str, options: Heed, query: Array | None, interpret: Any = False
) -> Tile:
    """`heed.heed_tile`; x [..., C, D]. One kernel fits the rows in turn, and packs them; what keys
    need for it of the queries, which is products and one factorization, XLA computes."""
    walk = _walk(x, role, options, interpret)
    rows, minor = walk.rows, walk.minor
    leaves: Shapes = {"codes": (packing.words(rows, options.bits), minor), "affine": (rows,)}
    shapes: Shapes = {"rows": (rows, minor), "scale": (rows,), "zero": (rows,)}
    scratch: dict[str, Any] = {name: plgpu.SMEM(shape, F32) for name, shape in shapes.items()}
    if role == "key" and options.feedback and query is not None:
        scratch |= {
            "errors": plgpu.SMEM((rows, minor), F32),
            "target": plgpu.SMEM((minor,), F32),
            "order": plgpu.SMEM((rows,), I32),
        }
        more = _weights(x, query, options)
        return _encode(_keys_in_turn, walk, True, leaves, scratch, x, *more)
    coupling = options.coupling if role == "value" and options.feedback else 0.0
    body = partial(_in_turn, coupling=coupling)
    return _encode(body, walk, True, leaves, scratch, x)


def _weights(x: Array, query: Array, options: Heed) -> tuple[Array, Array, Array]:
    """Of key tiles: the channels in the order of their turns, int32 [..., D]; and what each wants
    of the others' errors in the first pass and in the sweeps, float32 [..., D, D]."""
    power = score_power(as_rows(hadamard.rotate(x), "key"), hadamard.rotate(query), options)
    order, _, factor = order_and_factor(power)
    back, first = jnp.argsort(order, axis=-1), factor.swapaxes(-1, -2)
    first = jnp.take_along_axis(first, back[..., None], axis=-2)
    first = jnp.take_along_axis(first, back[..., None, :], axis=-1)
    diagonal, own = jnp.diagonal(power, axis1=-2, axis2=-1), jnp.eye(x.shape[-1], dtype=bool)
    return order.astype(I32), first, jnp.where(own, 0, power / diagonal[..., None])


def _in_turn(
    walk: _Walk, x_ref: Any, signs_ref: Any, codes_ref: Any, affine_ref: Any, *, shared: Any,
    coupling: float,
) -> None:  # fmt: skip
    """`heed.fit_row` of all rows, or, coupled, `heed.values_in_turn`."""
    # x [total,C,D]; codes [total,W,M], affine [total,R] int32
    _rotate(walk, x_ref.at[lax.axis_index("tile")], signs_ref, shared, x_ref.shape[-1] ** -0.5)

    def turn(t: Array, total: Array) -> Array:
        row = target = load(shared["rows"].at[t], _within_warps(walk.minor))
        if coupling:
            left = (walk.rows - t).astype(F32)
            # A row without range, such as a zero token's, can be exact, and stays so.
            ranged = row.max(axis=0) > row.min(axis=0)
            share = jnp.where(ranged, coupling / (1 + coupling * left), 0.0)
            target = row + share * total
        codes, scale, zero = _fit_row(walk, target)
        _keep(walk, shared, t, codes, scale, zero)
        return total + (row - (codes * scale + zero))

    lax.fori_loop(0, walk.rows, turn, full((walk.minor,), 0.0, _within_warps(walk.minor)))
    _finish(walk, shared, codes_ref, affine_ref)


def _keys_in_turn(
    walk: _Walk, x_ref: Any, signs_ref: Any, order_ref: Any, first_ref: Any, pull_ref: Any,
    codes_ref: Any, affine_ref: Any, *, shared: Any,
) -> None:  # fmt: skip
    # x [total,C,D], order [total,D] int32, first, pull [total,D,D] float32
    tile = lax.axis_index("tile")
    _rotate(walk, x_ref.at[tile], signs_ref, shared, x_ref.shape[-1] ** -0.5)
    _fetch(order_ref.at[tile], shared["order"], shared)
    nothing = full((PART, walk.minor), 0.0, _by_column(walk.minor))
    for first in range(0, walk.rows, PART):
        shared["errors"].at[pl.ds(first, PART)][...] = nothing

    def turn(t: Array, _: None, weights: Any, again: bool) -> None:
        channel = shared["order"][lax.rem(t, walk.rows)]
        shared["target"][...] = _target(walk, shared, weights.at[channel], channel)
        target = load(shared["target"], _within_warps(walk.minor))
        if again:
            scale, zero = shared["scale"][channel], shared["zero"][channel]
            codes, scale, zero = _refit_row(walk, target, scale, zero)
        else:
            codes, scale, zero = _fit_row(walk, target)
        row = load(shared["rows"].at[channel], _within_warps(walk.minor))
        shared["errors"].at[channel][...] = row - (codes * scale + zero)
        _keep(walk, shared, channel, codes, scale, zero)

    def passes(weights: Any) -> None:
        for source, turns, again in (
            (first_ref, walk.rows, False), (pull_ref, walk.options.sweeps * walk.rows, True),
        ):  # fmt: skip
            _fetch(source.at[tile], weights, shared)
            lax.fori_loop(0, turns, partial(turn, weights=weights, again=again), None)

    pl.run_scoped(passes, plgpu.SMEM((walk.rows, walk.rows), F32))
    _finish(walk, shared, codes_ref, affine_ref)


def _fetch(source: Any, target: Any, shared: Any) -> None:
    plgpu.commit_smem()  # whoever reads what lies there is done
    plgpu.copy_gmem_to_smem(source, target, shared["loaded"])
    plgpu.barrier_wait(shared["loaded"])


def _target(walk: _Walk, shared: Any, weights: Any, channel: Array) -> Array:
    """A channel's row [M] and, by `weights` [R], what it wants of the others' errors, a thread a
    column."""
    layout, shape = _by_column(walk.minor), (PART, walk.minor)

    def step(index: Array, total: Array) -> Array:
        at = pl.ds(index * PART, PART)
        weight = load(weights.at[at], layout.reduce(1))
        errors = load(shared["errors"].at[at], layout)
        return total + (errors * spread(weight, shape, 0, layout)).sum(axis=0)

    row = load(shared["rows"].at[channel], _own(walk.minor))
    return lax.fori_loop(0, walk.rows // PART, step, row)


def _within_warps(count: int) -> Any:
    """[count] in every warp, a thread keeps neighbours."""
    tiling = plgpu.Tiling(((count,), (count // 32,)))
    return TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1)


def _choices(count: int) -> Any:
    """[4n, count]: a warp keeps every fourth row, as `_within_warps` says."""
    tiling = plgpu.Tiling(((4, count), (count // 32,)))
    return TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _fit_row(walk: _Walk, row: Array) -> tuple[Array, Array, Array]:
    """`heed.fit_row` of [M]: codes as float32 [M], and scale and zero as stored."""
    layout, shape, clips = _choices(walk.minor), (CHOICES, walk.minor), walk.options.clips
    low, high = row.min(axis=0), row.max(axis=0)
    middle, half = (low + high) / 2, (high - low) / 2
    index = plgpu.broadcasted_iota(I32, (CHOICES,), 0, layout=layout.reduce(1))
    clip = full((CHOICES,), clips[0], layout.reduce(1))
    for i, share in enumerate(clips[1:], 1):
        clip = jnp.where(index >= i, share, clip)
    step = jnp.maximum(2 * half * clip / walk.levels, 1e-10)
    start = middle - half * clip

    def wide(x: Array) -> Array:
        return spread(x, shape, 0, layout)

    rows = spread(row, shape, 1, layout)
    codes, scale, zero = _round_and_fit(walk, rows, step, start, middle, wide)
    error = rows - (codes * wide(scale) + wide(zero))
    error = (error * error).sum(axis=1)
    best = jnp.where(error <= error.min(axis=0), index, CHOICES).min(axis=0)
    scale, zero, step, start = (
        jnp.where(index == best, x, 0.0).sum(axis=0) for x in (scale, zero, step, start)
    )
    return _round((row - start) * (1 / step), walk.levels), scale, zero


def _refit_row(walk: _Walk, row: Array, scale: Array, zero: Array) -> tuple[Array, Array, Array]:
    """`heed.refit_row` of [M]."""
    scale = jnp.where(jnp.abs(scale) > 1e-10, scale, 1e-10)
    middle = zero + walk.levels / 2 * scale
    return _round_and_fit(walk, row, scale, zero, middle, lambda x: x)


def _round_and_fit(
    walk: _Walk, row: Array, scale: Array, zero: Array, middle: Array,
    wide: Callable[[Array], Array],
) -> tuple[Array, Array, Array]:  # fmt: skip
    """`heed.round_and_fit` of [..., M], all of whose sums are taken at once: row and codes about
    the middle of their range. `wide` spreads what a row has over its numbers."""
    half, count, meta = walk.levels / 2, walk.minor, walk.options.meta_dtype
    codes = _round((row - wide(zero)) * wide(1 / scale), walk.levels)
    near, apart, last = row - middle, codes - half, row.ndim - 1
    mean, center = apart.sum(axis=last) * (1 / count), near.sum(axis=last) * (1 / count)
    power = (apart * apart).sum(axis=last) - count * mean * mean
    slope = (apart * near).sum(axis=last) - count * mean * center
    # One code less than all the others makes it 1 - 1/count.
    scale = jnp.where(power > 0.5, slope / jnp.maximum(power, 0.5), scale)
    zero = middle + center - scale * (mean + half)
    return codes, _half(scale, meta).astype(F32), _half(zero, meta).astype(F32)


def _keep(walk: _Walk, shared: Any, row: Array, codes: Array, scale: Array, zero: Array) -> None:
    """Stores a row's scale and zero, and its codes [M] in the place of those it had."""
    shared["scale"][row], shared["zero"][row] = scale, zero
    for bits, first, count, drop in _fields(walk):
        plane, at = lax.div(row, 4 * count), lax.rem(row, 4 * count)
        place, mask = 8 * lax.rem(at, 4) + bits * plane, (1 << bits) - 1
        words = shared["out_codes"].at[first + lax.div(at, 4)]
        old = load(words, _within_warps(walk.minor))
        new = codes.astype(I32) >> drop & mask
        words[...] = old & ~(mask << place) | new << place


def _finish(walk: _Walk, shared: Any, codes_ref: Any, affine_ref: Any) -> None:
    scale, zero = (load(shared[name], _own(walk.rows)) for name in ("scale", "zero"))
    shared["out_affine"][...] = _pair(scale, zero, walk.options.meta_dtype)
    _write_out(shared, {"codes": codes_ref, "affine": affine_ref})
