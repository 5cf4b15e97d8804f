"""The kernel for TPUs (Mosaic): a step reads some entries of all KV heads of a row, and the online
softmax (arXiv 1805.02867) runs over steps.

Products take operands of the entries' dtype and add in float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops.dense_decode_attention.blocks import LANES, Tpu
from kvjax.ops.mosaic_tpu import bias_rows
from kvjax.ops.partials import DECODE, Partial, Scoring, group_queries, ungroup

FLOOR = -1e20  # below every score: the maximum over nothing, so that exp2(−inf − FLOOR) is 0
LOG2E = math.log2(math.e)
SUBLANES = 8


def refusal(query: Array, key: Array, value: Array) -> str:
    """Why the kernel cannot take these arguments; "" if it can."""
    if query.shape[1] > DECODE:
        return f"{query.shape[1]} new tokens, it takes up to {DECODE}"
    if key.dtype != value.dtype or key.dtype not in (jnp.bfloat16, jnp.float32):
        return f"keys of {key.dtype} and values of {value.dtype}, it takes bfloat16 or float32"
    return ""


class _Shape(NamedTuple):
    tokens: int  # T
    rows: int  # of a head, G·T padded to whole registers
    bias_rows: int
    scoring: Scoring
    entries: int


def attention(
    query: Array,
    key: Array,
    value: Array,
    length: Array,
    bias: Array | None,
    *,
    scoring: Scoring,
    blocks: Tpu,
    interpret: Any = False,
) -> Partial:
    """See `dense_decode_attention`; `interpret` is what `pallas_call` takes."""
    batch, kv_heads, size, dim = key.shape
    blocks.check(size)
    entries, tokens = blocks.entries, query.shape[1]
    grouped = group_queries(query.astype(jnp.float32), kv_heads)
    group = grouped.shape[2]
    rows = -(-group // SUBLANES) * SUBLANES
    grouped = jnp.pad(grouped, [(0, 0), (0, 0), (0, rows - group), (0, 0)])
    shape = _Shape(tokens, rows, 0 if bias is None else bias.shape[1], scoring, entries)

    def place(b: Any, i: Any, length: Any) -> Any:
        # Steps beyond the row's end read the block of the last one again, which costs nothing.
        return jnp.minimum(i, jnp.maximum((length[b] - 1) // entries, 0))

    def entry_spec(width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, kv_heads, entries, width), lambda b, i, n: (b, 0, place(b, i, n), 0)
        )

    def row_spec(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, kv_heads, rows, width), lambda b, i, n: (b, 0, 0, 0))

    operands, specs = [grouped, key, value], [row_spec(dim), entry_spec(dim)]
    width = value.shape[-1]
    specs.append(entry_spec(width))
    if bias is not None:
        operands.append(bias)
        specs.append(
            pl.BlockSpec((1, bias.shape[1], entries), lambda b, i, n: (b, 0, place(b, i, n)))
        )
    out, lse = pl.pallas_call(
        functools.partial(_kernel, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, -(-size // entries)),
            in_specs=specs,
            out_specs=[row_spec(width), row_spec(LANES)],
            scratch_shapes=[
                pltpu.VMEM((kv_heads, rows, 1), jnp.float32),  # maximum
                pltpu.VMEM((kv_heads, rows, 1), jnp.float32),  # Σ p
                pltpu.VMEM((kv_heads, rows, width), jnp.float32),  # Σ p·v
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, rows, n), jnp.float32) for n in (width, LANES)
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="dense_decode_attention",
    )(length, *operands)
    return Partial(ungroup(out[:, :, :group], tokens), ungroup(lse[:, :, :group, 0], tokens))


def _kernel(shape: _Shape, length_ref: Any, query_ref: Any, key_ref: Any, value_ref: Any,
            *refs: Any) -> None:  # fmt: skip
    bias_ref = refs[0] if shape.bias_rows else None
    out_ref, lse_ref, top_ref, total_ref, sum_ref = refs[-5:]
    left = length_ref[pl.program_id(0)] - pl.program_id(1) * shape.entries

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        top_ref[...] = jnp.full_like(top_ref, FLOOR)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(left > 0)
    def _() -> None:
        scores = _scores(shape, query_ref[0], key_ref[0], bias_ref, left)
        before = top_ref[...]
        top = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
        p, keep = jnp.exp2(scores - top), jnp.exp2(before - top)
        # Invalid entries have p = 0, but 0·NaN would still be NaN.
        value = value_ref[0]
        entry = lax.broadcasted_iota(jnp.int32, value.shape, 1)
        value = jnp.where(entry < left, value, jnp.zeros_like(value))
        top_ref[...] = top
        total_ref[...] = keep * total_ref[...] + jnp.sum(p, axis=-1, keepdims=True)
        sum_ref[...] = keep * sum_ref[...] + _product("kqs,ksd->kqd", p, value)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        total = total_ref[...]
        share = jnp.where(total > 0, total, 1.0)
        lse = jnp.where(total > 0, (top_ref[...] + jnp.log2(share)) / LOG2E, -jnp.inf)
        lse_ref[0] = jnp.broadcast_to(lse, lse_ref.shape[1:])
        out_ref[0] = sum_ref[...] / share


def _product(axes: str, a: Array, b: Array) -> Array:
    exact = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(
        axes, a.astype(b.dtype), b, precision=exact, preferred_element_type=jnp.float32
    )


def _scores(shape: _Shape, query: Array, key: Array, bias_ref: Any, left: Any) -> Array:
    """Scores in units of log 2, [K,rows,entries]; −inf where nothing is."""
    scores = _product("kqd,ksd->kqs", query, key) * shape.scoring.scale
    cap = shape.scoring.softcap
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if bias_ref is not None:
        scores += bias_rows(bias_ref[0], shape.rows, shape.tokens)
    entry = lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    return jnp.where(entry < left, scores * LOG2E, -jnp.inf)
