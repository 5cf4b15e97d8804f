"""Attention of a few queries over exact entries: sinks, the newest tokens, and for comparison."""

from __future__ import annotations

from jax import Array

from kvjax.ops.dense_decode_attention import gpu, reference, tpu
from kvjax.ops.dense_decode_attention.blocks import tpu_blocks
from kvjax.ops.dispatch import choose, gpu_cores
from kvjax.ops.gpu_blocks import dense_blocks
from kvjax.ops.partials import Partial, Scoring

NAME = "dense_decode_attention"


def dense_decode_attention(
    query: Array,
    key: Array,
    value: Array,
    length: Array,
    *,
    scoring: Scoring,
    bias: Array | None = None,
    implementation: str | None = None,
) -> Partial:
    """The partial of T queries over the first `length` entries of each row.

    Args:
      query: [B,T,H,Dk], T ≤ 8 for the kernels.
      key, value: [B,K,S,Dk] and [B,K,S,Dv], float32 or bfloat16.
      length: [B] int32, valid entries, 0 … S. Later ones may hold anything, NaN included.
      scoring: scale and softcap.
      bias: [B,1|T,S] float32, added to the scores; −inf hides an entry.
      implementation: None, "reference", "tpu" or "gpu" (see `dispatch.choose`).

    Returns:
      out [B,T,H,Dv] float32 and lse [B,T,H] float32; 0 and −inf where a query sees nothing.

    Raises:
      ValueError: for an implementation that cannot take these arguments, with the reason.
    """
    refusals = {
        "tpu": lambda: tpu.refusal(query, key, value),
        "gpu": lambda: gpu.refusal(query, key, value),
    }
    chosen = choose(NAME, implementation, refusals, (query, key, value))
    arguments = (query, key, value, length, bias)
    if chosen == "reference":
        return reference.attention(*arguments, scoring=scoring)
    batch, kv_heads, size, _ = key.shape
    if chosen == "gpu":
        walk = dense_blocks(batch, kv_heads, size, gpu_cores())
        return gpu.attention(*arguments, scoring=scoring, blocks=walk)
    entry_bytes = kv_heads * key.dtype.itemsize * (key.shape[-1] + value.shape[-1])
    return tpu.attention(*arguments, scoring=scoring, blocks=tpu_blocks(size, entry_bytes))
