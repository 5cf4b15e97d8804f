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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from kvjax.ops.partials import Partial, group_queries, ungroup

F32, F16, I32 = np.dtype("float32"), np.dtype("float16"), np.dtype("int32")
LOG2E = math.log2(math.e)
ROWS = 64  # of a warpgroup product
MAX_COLUMNS = 32  # queries of one block of threads: more do not fit its registers
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


def device_refusal() -> str:
    """Why the device at hand cannot run the kernels; "" if it can, or if it is no GPU (ahead of
    time, and under the interpreter)."""
    if jax.default_backend() != "gpu":
        return ""
    capability = jax.devices()[0].compute_capability
    if capability == "9.0":
        return ""
    return f"warpgroup products need compute capability 9.0 (Hopper), not {capability}"


def load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, x: Array) -> None:
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:  # before JAX 0.12, which wants rows in shared memory that keep banks apart
        ref[...] = x


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


def products(
    sums: Sequence[Sequence[tuple[Array, Any]]], rows: int, columns: int, interpret: bool
) -> list[Array]:
    """For each sum Σ a @ b over (a in registers [rows,k], b transposed in shared memory
    [columns,k]); all of them are on their way before the first is waited for."""
    if interpret:
        return [
            jnp.stack([jnp.dot(a, b[...].T, preferred_element_type=F32) for a, b in pairs]).sum(0)
            for pairs in sums
        ]

    def body(*accumulators: Any) -> list[Array]:
        for acc, pairs in zip(accumulators, sums, strict=True):
            for a, b in pairs:
                plgpu.wgmma(acc, a, b.transpose((1, 0)))
        return [acc[...] for acc in accumulators]

    return pl.run_scoped(body, *[plgpu.ACC((rows, columns), F32)] * len(sums))


def fold(query: Array, heads: int) -> tuple[Array, int]:
    """[B,T,H,D] as [B,K,parts,columns,D], zeros added, and how many rows of a KV head are real:
    `columns` is a multiple of 8, up to 32, and `parts` of them hold a KV head's queries."""
    grouped = group_queries(query, heads)
    count = grouped.shape[2]
    columns = min(MAX_COLUMNS, -(-count // 8) * 8)
    parts = -(-count // columns)
    padded = jnp.pad(grouped, [(0, 0), (0, 0), (0, parts * columns - count), (0, 0)])
    return padded.reshape(*padded.shape[:2], parts, columns, padded.shape[-1]), count


def unfold(out: Array, lse: Array, count: int, tokens: int) -> Partial:
    """Merges the splits: out [B,K,splits,parts,columns/8,D,8], lse [B,K,splits,parts,columns]."""
    rows = jnp.moveaxis(out, -1, -2)
    rows = rows.reshape(*rows.shape[:3], -1, rows.shape[-1])[:, :, :, :count]
    lse = lse.reshape(*lse.shape[:3], -1)[:, :, :, :count]
    top = lse.max(axis=2, keepdims=True)
    weights = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(axis=2)
    share = jnp.where(total > 0, total, 1.0)
    merged = (weights[..., None] * rows).sum(axis=2) / share[..., None]
    lse = jnp.where(total > 0, top[:, :, 0] + jnp.log(share), -jnp.inf)
    return Partial(ungroup(merged, tokens), ungroup(lse, tokens))


def columns_of(bias: Array, tokens: int, parts: int, columns: int) -> Array:
    """A bias [B,T,S] as [B,parts,columns,S]: a row for every query of a KV head, heads before
    tokens, so that no kernel need know which token a query is of."""
    wide = bias[:, jnp.arange(parts * columns) % tokens]
    return wide.reshape(bias.shape[0], parts, columns, -1)


def walk_over(size: Array, splits: int) -> tuple[Array, Array]:
    """The first of `size` tiles that this block of threads reads, and how many."""
    each = lax.div(size + (splits - 1), splits)
    first = lax.axis_index("split") * each
    return first, jnp.minimum(size - first, each)


def soften(top: Array, scores: Sequence[Array]) -> tuple[Array, Array, list[Array]]:
    """One step of the online softmax in base 2 (arXiv 1805.02867), over columns.

    Args:
      top: [columns], the running maximum.
      scores: [R,columns] each.

    Returns:
      The new maximum, the factor of what was summed before, and exp2(score − maximum).
    """
    best = scores[0]
    for other in scores[1:]:
        best = jnp.maximum(best, other)
    top, before = jnp.maximum(top, best.max(axis=0)), top
    safe = jnp.where(top > -jnp.inf, top, 0.0)
    return top, jnp.exp2(before - safe), [jnp.exp2(s - spread(safe, s.shape, 1)) for s in scores]


def write(top: Array, total: Array, out: Array, shared: Any, targets: Sequence[Any]) -> None:
    """out [D,columns] over total [columns], and the lse, to `targets` in HBM; zeros and −inf where
    nothing was seen."""
    some = total > 0
    share = 1.0 / jnp.where(some, total, 1.0)
    out = out * spread(share, out.shape, 1)
    for i in range(out.shape[1] // 8):  # by 8 columns, or threads would fall on the same banks
        shared["out"].at[i][...] = out[:, 8 * i : 8 * i + 8]
    lse = (top + jnp.log2(jnp.where(some, total, 1.0))) * (1 / LOG2E)
    shared["lse"][...] = jnp.where(some, lse, -jnp.inf)
    plgpu.commit_smem()
    for name, target in zip(("out", "lse"), targets, strict=True):
        plgpu.copy_smem_to_gmem(shared[name], target)
    plgpu.wait_smem_to_gmem(0)


COMPILER = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,  # each kernel says why its own are enough
)
