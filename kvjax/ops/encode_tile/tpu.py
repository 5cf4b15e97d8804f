"""The TPU kernel: a tile is read once, encoded in vector registers and VMEM, and written once.

A grid step takes a few tiles. The rotation is one matrix product with a Hadamard matrix built on
the spot (for keys contracted so that channels come out as rows), packing another one with powers
of two, whose sums of up to 16 bits float32 holds exactly.
"""

from __future__ import annotations

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
from kvjax.ops.encode_tile.reference import Kvarn, balance, tile_std

TILES = 4


def kvarn_refusal(x: jax.Array, options: Kvarn) -> str:
    """Why the kernel cannot take these arguments; "" if it can."""
    tokens, dim = x.shape[-2:]
    if options.clip:
        return "clip needs the quantiles of rows, which the kernel does not sort"
    if options.scale_bits != 16:
        return f"scale_bits={options.scale_bits} is the reference's alone"
    if x.size == 0:
        return "there is no tile"
    if tokens % 8 or dim % 8:
        return f"tiles of {tokens} tokens and head_dim={dim} are no whole registers of 8 rows"
    return ""


def kvarn_tile(
    x: jax.Array, role: str, options: Kvarn, blocks: Blocks | None = None, interpret: Any = False
) -> Tile:
    """`reference.kvarn_tile` in one kernel; x [..., C, D]."""
    *lead, tokens, dim = x.shape
    rows, minor = (dim, tokens) if role == "key" else (tokens, dim)
    total = x.size // (tokens * dim)
    blocks = blocks or Blocks(largest_divisor(total, TILES))
    blocks.check(total)
    words = packing.words(rows, options.bits)
    shapes = {"codes": (words, minor), "affine": (1, rows), "column": (1, minor // 2)}
    out = pl.pallas_call(
        partial(_kvarn, role=role, options=options),
        grid=(total // blocks.tiles,),
        in_specs=[_block(blocks.tiles, tokens, dim)],
        out_specs=[_block(blocks.tiles, *shape) for shape in shapes.values()],
        out_shape=[jax.ShapeDtypeStruct((total, *shape), jnp.int32) for shape in shapes.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=f"encode_{role}_kvarn",
    )(x.reshape(total, tokens, dim))
    tile = dict(zip(shapes, out, strict=True))
    tile["affine"], tile["column"] = tile["affine"][:, 0], tile["column"][:, 0]
    return {name: leaf.reshape(*lead, *leaf.shape[1:]) for name, leaf in tile.items()}


def _block(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda i: (i, 0, 0))


def _kvarn(
    x_ref: Any, codes_ref: Any, affine_ref: Any, column_ref: Any, *, role: str, options: Kvarn
) -> None:
    # x [n,C,D]; codes [n,W,M], affine [n,1,R], column [n,1,M/2] int32
    tiles = range(x_ref.shape[0])
    rows = jnp.stack([_rows(x_ref[i], role, options.rotate) for i in tiles])
    size = tile_std(rows) if options.normalize_tile else jnp.ones((), jnp.float32)
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
    x = x.astype(jnp.float32)
    if not rotate:
        return x.T if role == "key" else x
    matrix = _hadamard(x.shape[-1])
    left, right = (matrix, x) if role == "key" else (x, matrix)
    return lax.dot_general(
        left, right, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _hadamard(dim: int) -> jax.Array:
    """`kvjax.ops.hadamard.hadamard_matrix`."""
    shared = _iota((dim, dim), 0) & _iota((dim, dim), 1)
    odd = lax.population_count(shared) & 1
    return jnp.where(odd == 1, -(dim**-0.5), dim**-0.5).astype(jnp.float32)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _quantize(rows: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`kvjax.ops.rounding.quantize_rows`, with codes as float32."""
    levels = jnp.float32(2**bits - 1)
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
    return low.astype(jnp.int32) | (high.astype(jnp.int32) << 16)


def _pack_halves(codes: jax.Array, bits: int, words: int, half: int) -> jax.Array:
    """The lower or upper 16 bits of every word, as whole numbers in float32 [W,M]."""
    word, row = _iota((words, codes.shape[0]), 0), _iota((words, codes.shape[0]), 1)
    byte = row % 4 - 2 * half
    shift = 8 * byte + bits * (row // (4 * words))
    mine = (row // 4 % words == word) & (byte >= 0) & (byte < 2)
    powers = jnp.where(mine, 1 << jnp.where(mine, shift, 0), 0).astype(jnp.float32)
    return jnp.dot(
        powers.astype(jnp.bfloat16), codes.astype(jnp.bfloat16), preferred_element_type=jnp.float32
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
    """float32 to the bits of a 16-bit float, in the lower half of an int32: ties to even, what is
    too large clipped. Not every TPU converts to float16, so it is done on the bits."""
    limit = float(jnp.finfo(meta_dtype).max)
    bits = lax.bitcast_convert_type(jnp.clip(x, -limit, limit), jnp.int32)
    if meta_dtype == "bfloat16":
        return lax.shift_right_logical(bits + 0x7FFF + (lax.shift_right_logical(bits, 16) & 1), 16)
    sign, size = lax.shift_right_logical(bits, 16) & 0x8000, bits & 0x7FFFFFFF
    normal = (size + 0xFFF + ((size >> 13) & 1) - (112 << 23)) >> 13
    # Below 2^-14 float16 counts in steps of 2^-24, which are those of float32 from 0.5 on.
    half = lax.bitcast_convert_type(size, jnp.float32) + 0.5
    small = lax.bitcast_convert_type(half, jnp.int32) - 0x3F000000
    return sign | jnp.where(size < (113 << 23), small, normal)
