"""The TPU kernel for small states: the rows of all heads of all batch rows lie on the lanes.

A state of 8 × 8 would fill a sixteenth of a register. But its rows do not know of each other: row i
needs the head's key and query and its own value and gates. So B·H·V rows run side by side, each a
column of K numbers, and one token is a handful of vector operations on whole registers. The state
stays in registers within a grid step, and in VMEM from one to the next.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops.delta_scan.blocks import Blocks, blocks_for
from kvjax.ops.delta_scan.reference import Rule, Tokens

F32 = jnp.float32
MOST_CHANNELS = 32  # beyond, the chunked form's matrix products are faster
UNROLL = 8


def refusal(rule: Rule, state: jax.Array, tokens: Tokens) -> str:
    """Why the kernel cannot take these arguments; "" if it can."""
    rows, channels = state.shape[-2:]
    if channels > MOST_CHANNELS or rows > MOST_CHANNELS:
        return f"states of {rows} × {channels} are too large; the chunked form takes them"
    return ""


def scan(
    rule: Rule, state: jax.Array, tokens: Tokens, size: int | None = None,
    blocks: Blocks | None = None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The final state [B,H,V,K], the reads [T,B,H,V], and the states [N,B,H,V,K] at which chunks
    of `size` tokens start."""
    total, channels = tokens.query.shape[0], tokens.query.shape[-1]
    lead, rows = state.shape[:3], state.size // channels
    blocks = blocks or blocks_for(rows, channels, size or 64)
    lanes = -(-rows // blocks.lanes) * blocks.lanes
    steps = -(-total // blocks.tokens)

    def fill(x: jax.Array) -> jax.Array:  # to whole blocks
        wide = [(0, steps * blocks.tokens - total), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, [*wide, (0, lanes - rows)])

    count = state.shape[2]
    by_channel = partial(_channels_on_sublanes, rows=count)
    by_row = partial(_rows_on_lanes, rows=count)
    decay = (by_channel if rule.per == "key" and tokens.decay.shape[-1] > 1 else by_row)(
        tokens.decay
    )
    given = [by_channel(tokens.query), by_channel(tokens.key), by_row(tokens.value), decay,
             by_row(tokens.erase)]  # fmt: skip
    if tokens.erase_key is not None:
        given.append(by_channel(tokens.erase_key))
    packed = jnp.pad(state.reshape(rows, channels).T, ((0, 0), (0, lanes - rows)))
    call = _call(rule, channels, lanes, steps, blocks, tuple(x.ndim for x in given), interpret)
    reads, final, starts = call(packed, *(fill(x) for x in given))
    unpack = partial(_unpack, lead=lead)
    return unpack(final[None])[0], reads[:total, :rows].reshape(total, *lead), unpack(starts)


def _channels_on_sublanes(x: jax.Array, rows: int) -> jax.Array:
    """[T,B,H,K] -> [T,K,B·H·V], each head's numbers under all its rows."""
    flat = x.reshape(x.shape[0], -1, x.shape[-1]).swapaxes(1, 2)
    return jnp.repeat(flat, rows, axis=2)


def _rows_on_lanes(x: jax.Array, rows: int) -> jax.Array:
    """[T,B,H,V] (or 1) -> [T,B·H·V]."""
    return jnp.broadcast_to(x, (*x.shape[:-1], rows)).reshape(x.shape[0], -1)


def _unpack(states: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """[N,K,lanes] -> [N,B,H,V,K]."""
    rows = lead[0] * lead[1] * lead[2]
    return states[..., :rows].swapaxes(1, 2).reshape(states.shape[0], *lead, states.shape[1])


def _call(
    rule: Rule, channels: int, lanes: int, steps: int, blocks: Blocks, ranks: tuple[int, ...],
    interpret: Any,
) -> Any:  # fmt: skip
    def of_tokens(rank: int) -> pl.BlockSpec:
        if rank == 3:
            return pl.BlockSpec((blocks.tokens, channels, blocks.lanes), lambda i, t: (t, 0, i))
        return pl.BlockSpec((blocks.tokens, blocks.lanes), lambda i, t: (t, i))

    whole = pl.BlockSpec((channels, blocks.lanes), lambda i, t: (0, i))
    start = pl.BlockSpec((1, channels, blocks.lanes), lambda i, t: (t, 0, i))
    return pl.pallas_call(
        partial(_kernel, rule=rule),
        grid=(lanes // blocks.lanes, steps),
        in_specs=[whole, *(of_tokens(rank) for rank in ranks)],
        out_specs=[of_tokens(2), whole, start],
        out_shape=[
            jax.ShapeDtypeStruct((steps * blocks.tokens, lanes), F32),
            jax.ShapeDtypeStruct((channels, lanes), F32),
            jax.ShapeDtypeStruct((steps, channels, lanes), F32),
        ],
        scratch_shapes=[pltpu.VMEM((channels, blocks.lanes), F32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name=f"delta_scan_{rule.per}_{rule.read}",
    )


def _kernel(first_ref: Any, *refs: Any, rule: Rule) -> None:
    # first [K,L]; query, key (and erase_key) [C,K,L]; value, erase [C,L]; decay [C,L] or [C,K,L];
    # reads [C,L]; final [K,L]; start [1,K,L]; state [K,L]
    *given, reads_ref, final_ref, start_ref, state_ref = refs
    query_ref, key_ref, value_ref, decay_ref, erase_ref = given[:5]
    erase_key_ref = given[5] if len(given) > 5 else key_ref

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        state_ref[...] = first_ref[...]

    def one(t: jax.Array, state: jax.Array) -> jax.Array:
        here = pl.ds(t, 1)
        log = decay_ref[t] if len(decay_ref.shape) == 3 else decay_ref[here]
        found = (state * erase_key_ref[t]).sum(0, keepdims=True)  # [1,L]
        added = value_ref[here] - erase_ref[here] * found
        new = jnp.exp(log) * state + added * key_ref[t]
        seen = state if rule.read == "before" else new
        reads_ref[here] = (seen * query_ref[t]).sum(0, keepdims=True)
        return new

    state = state_ref[...]
    start_ref[0] = state
    state = lax.fori_loop(0, value_ref.shape[0], one, state, unroll=UNROLL)
    state_ref[...] = state
    final_ref[...] = state
