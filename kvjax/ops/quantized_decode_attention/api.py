"""Attention of a few queries over packed low-bit tiles; kernels fold the scales in."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kvjax.ops.affine import Affine, Tile
from kvjax.ops.dispatch import choose, gpu_cores
from kvjax.ops.gpu_blocks import packed_blocks
from kvjax.ops.partials import Partial, Scoring
from kvjax.ops.quantized_decode_attention import gpu, reference, tpu
from kvjax.ops.quantized_decode_attention.blocks import LANES, Tpu, tpu_blocks, tpu_cores

NAME = "quantized_decode_attention"


def quantized_decode_attention(
    query: Array,
    positions: Array,
    key: Tile,
    value: Tile,
    made: Array,
    *,
    format: Affine,
    scoring: Scoring,
    first: int = 0,
    window: int | None = None,
    bias: Array | None = None,
    implementation: str | None = None,
) -> Partial:
    """The partial of T queries over the encoded tiles of a cache.

    With x = (code·a + z)·c for keys and values (see `Affine`), a kernel never builds x:

        q·k_t = c_t·(Σ_d (q_d·a_d)·code_dt + Σ_d q_d·z_d)
        out_d = c_d·(Σ_t (p_t·a_t)·code_td + Σ_t p_t·z_t)      (per tile)

    Args:
      query: [B,T,H,D], T ≤ 8 for the kernels, in the frame in which tiles are stored.
      positions: [B,T] int32, the queries' positions; read only where there is a window.
      key, value: leaves [B,K,N,...] as `Affine` says; tile number m lies in slot m mod N. Slots
        that hold no tile yet may hold anything.
      made: [B] int32, tiles made so far by each row.
      format: how tiles are stored.
      scoring: scale and softcap.
      first: the position of tile 0's first token.
      window: a query sees the newest `window` tokens, itself included; None: all.
      bias: [B,1|T,N·C] float32, added to the scores; −inf hides an entry.
      implementation: None, "reference", "tpu" or "gpu" (see `dispatch.choose`).

    Returns:
      out [B,T,H,D] float32, in the stored frame, and lse [B,T,H] float32.

    Raises:
      ValueError: for an implementation that cannot take these arguments, with the reason.
    """
    refusals = {
        "tpu": lambda: tpu.refusal(query, value, format),
        "gpu": lambda: gpu.refusal(query, value, format),
    }
    chosen = choose(NAME, implementation, refusals, (query, key, value))
    if chosen == "reference":
        dim_k, dim_v = query.shape[-1], value["codes"].shape[-1]

        def decode(cut: tuple[Tile, Tile]) -> tuple[Array, Array]:
            return format.decode(cut[0], "key", dim_k), format.decode(cut[1], "value", dim_v)

        return reference.attend_tiles(
            query, positions, (key, value), made, decode, tile=format.tile, scoring=scoring,
            first=first, window=window, bias=bias, by_channel=True,
        )  # fmt: skip
    tiles = key["codes"].shape[2]
    if window is not None:
        hidden = window_bias(positions, made, tiles, format.tile, first, window)
        bias = hidden if bias is None else bias + hidden
    length = jnp.minimum(made, tiles) * format.tile
    arguments = (query, key, value, length, bias)
    if chosen == "gpu":
        walk = packed_blocks(query.shape[0], key["codes"].shape[1], tiles, gpu_cores())
        return gpu.attention(*arguments, format=format, scoring=scoring, blocks=walk)
    blocks = tpu_walk(query, key, format, tpu_cores())
    return tpu.attention(*arguments, format=format, scoring=scoring, blocks=blocks)


def tpu_walk(query: Array, key: Tile, format: Affine, cores: int) -> Tpu:
    """How a TPU of `cores` cores walks over a cache; only shapes are read."""
    batch, tokens, heads, dim = query.shape
    kv_heads, tiles = key["codes"].shape[1:3]
    tile_bytes = format.tile_bytes("key", dim) + format.tile_bytes("value", dim)
    row_bytes = 4 * tokens * heads // kv_heads * (dim + LANES)
    return tpu_blocks(batch, kv_heads, tiles, format.tile, tile_bytes, row_bytes, cores)


def window_bias(
    positions: Array, made: Array, tiles: int, tile: int, first: int, window: int
) -> Array:
    """[B,T,N·C] float32, 0 where a query sees the entry in a slot and −inf elsewhere: what a
    window, and slots reused in turn, are to a kernel."""
    slot = jnp.arange(tiles, dtype=jnp.int32)
    number = made[:, None] - 1 - (made[:, None] - 1 - slot) % tiles
    token = number[..., None] * tile + jnp.arange(tile, dtype=jnp.int32)
    token = first + token.reshape(made.shape[0], 1, -1)
    seen = (token > positions[:, :, None] - window) & (token >= first)
    return jnp.where(seen, 0.0, -jnp.inf)
