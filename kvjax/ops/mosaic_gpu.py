"""What the Mosaic GPU kernels share: layouts, the two register moves that Pallas has no words for,
and the online softmax of scores that lie tokens × queries.

Each function takes ``interpret``: GPU interpret mode knows neither register operands of a
warpgroup product, nor reshaped references, nor inlined register code, and gets the same values in
plain ``jnp`` there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

F32, F16, I32 = np.dtype("float32"), np.dtype("float16"), np.dtype("int32")
LOG2E = math.log2(math.e)
ROWS = 64  # of a warpgroup product
TILED = plgpu.Layout.TILED
WG = plgpu.Layout.WGMMA  # [64m, 8n]: of accumulators, and of 16-bit operands in registers
BY_ROW, BY_QUERY = WG.reduce(1), WG.reduce(0)
# [64m, 4n, 1] words; a word lies where `WG` keeps the two neighbouring float16 that it is made of.
WORDS = TILED(
    plgpu.Tiling(((64, 4, 1), (16, 4, 1), (8, 4, 1))),
    warp_dims=(-9,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# [128m]: a thread of `BY_ROW` that keeps row i keeps the neighbours 2i and 2i + 1 here.
PAIRS = TILED(
    plgpu.Tiling(((128,), (32,), (16,), (2,))),
    warp_dims=(-4,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)


def load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def spread(x: Array, shape: tuple[int, ...], axis: int, layout: Any = WG) -> Array:
    """A vector along `axis` of an array of `shape`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)


def full(shape: tuple[int, ...], value: float, layout: Any = WG) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, F32), layout)


def tiled(width: int) -> tuple[Any, ...]:
    """How shared memory holds an operand of a product: rows of 8 × `width` 16-bit numbers."""
    transforms: Any = plgpu  # mypy takes the transforms for abstract
    return transforms.TilingTransform((8, width)), transforms.SwizzleTransform(2 * width)


def every_second(x: Array, first: int, layout: Any, out: Any, interpret: bool) -> Array:
    """x[first::2] of a vector whose layout keeps neighbours in one register."""
    if interpret:
        return x[first::2]

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct((x.shape[0] // 2,), x.dtype, layout=out),
    )
    def take(ctx: Any, x: Any) -> Any:
        del ctx
        one = ir.VectorType.get((1,), x.mlir_dtype)
        registers = np.empty(x.registers.shape, dtype=object)
        for place, pair in np.ndenumerate(x.registers):
            registers[place] = vector.extract_strided_slice(one, pair, [first], [1], [1])
        registers = registers.reshape(out.to_mgpu().registers_shape((x.shape[0] // 2,)))
        return FragmentedArray(_registers=registers, _layout=out.to_mgpu(), _is_signed=x.is_signed)

    return take(x)


def halves(blocks: Sequence[Array], interpret: bool) -> Array:
    """Words [R,n,1] of several blocks, side by side, as float16 [R,2·Σn]: the low half of a word,
    then its high half."""
    if interpret:
        flat = jnp.concatenate([x[..., 0] for x in blocks], axis=1)
        return lax.bitcast_convert_type(flat, F16).reshape(flat.shape[0], -1)
    rows, columns = blocks[0].shape[0], 2 * sum(x.shape[1] for x in blocks)

    @plgpu.inline_mgpu(
        arg_types=(WORDS,) * len(blocks),
        return_type=plgpu.ShapeDtypeStruct((rows, columns), F16, layout=WG),
    )
    def cast(ctx: Any, *blocks: Any) -> Any:
        del ctx
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        words = np.concatenate([x.registers for x in blocks], axis=1)
        registers = np.empty(words.shape, dtype=object)
        for place, word in np.ndenumerate(words):
            registers[place] = vector.bitcast(pair, word)
        registers = registers.reshape(WG.to_mgpu().registers_shape((rows, columns)))
        return FragmentedArray(_registers=registers, _layout=WG.to_mgpu(), _is_signed=None)

    return cast(*blocks)


def product(pairs: Sequence[tuple[Array, Any]], rows: int, columns: int, interpret: bool) -> Array:
    """Σ a @ b over (a in registers [rows,k], b transposed in shared memory [columns,k])."""
    if interpret:
        products = [jnp.dot(a, b[...].T, preferred_element_type=F32) for a, b in pairs]
        return jnp.stack(products).sum(axis=0)

    def body(acc: Any) -> Array:
        for a, b in pairs:
            plgpu.wgmma(acc, a, b.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((rows, columns), F32))
