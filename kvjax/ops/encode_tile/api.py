"""One tile of keys or values turned into few bits: read once, written once where a kernel runs."""

from __future__ import annotations

import jax

from kvjax.ops import hadamard, packing
from kvjax.ops.affine import Tile
from kvjax.ops.dispatch import choose
from kvjax.ops.encode_tile import gpu, heed, reference, tpu
from kvjax.ops.encode_tile.heed import Heed
from kvjax.ops.encode_tile.reference import Kvarn

NAME = "encode_tile"


def kvarn_tile(
    x: jax.Array, role: str, options: Kvarn, *, implementation: str | None = None
) -> Tile:
    """Rotates, evens out, rounds and packs tiles as KVarN does (arXiv 2606.03458).

    Args:
      x: [..., C, D], any float dtype, in the original frame; all leading axes are tiles.
      role: "key" (R = D rows of M = C numbers) or "value" (R = C rows of M = D numbers).
      options: see `kvjax.encode.kvarn`. Clipped ranges and 8-bit scales are the reference's alone;
        `normalize_tile` has no GPU kernel.
      implementation: None, "reference", "tpu" or "gpu" (see `kvjax.ops.dispatch.choose`).

    Returns:
      ``codes`` int32 [..., words(R), M], ``affine`` int32 [..., R] and ``column`` int32 [..., M/2],
      as `kvjax.ops.affine.Affine` reads them; with 8-bit scales what `kvjax.encode.kvarn.KVarN`
      says. Where two rounds of the balance tie, implementations may take either.

    Raises:
      ValueError: for another role, width, dtype or head dim, or an implementation that cannot take
        these arguments.
    """
    check(x, role, options.bits, options.meta_dtype)
    if options.rotate:
        hadamard.check_dim(x.shape[-1])
    refusals = {
        "tpu": lambda: tpu.kvarn_refusal(x, options),
        "gpu": lambda: gpu.kvarn_refusal(x, options),
    }
    chosen = choose(NAME, implementation, refusals, x)
    if chosen == "tpu":
        return tpu.kvarn_tile(x, role, options)
    if chosen == "gpu":
        return gpu.kvarn_tile(x, role, options)
    return reference.kvarn_tile(x, role, options)


def heed_tile(
    x: jax.Array,
    role: str,
    options: Heed,
    query: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> Tile:
    """Rotates, fits row by row with error feedback, and packs tiles; see `kvjax.encode.heed`.

    Args:
      x: [..., C, D], any float dtype, in the original frame; all leading axes are tiles.
      role: "key" (R = D rows of M = C numbers) or "value" (R = C rows of M = D numbers).
      options: see `kvjax.encode.heed`.
      query: [..., n, D], queries in the original frame, as the keys will meet them; None: keys
        are fitted without feedback. Values do not read it.
      implementation: None, "reference", "tpu" or "gpu" (see `kvjax.ops.dispatch.choose`).

    Returns:
      ``codes`` int32 [..., words(R), M] and ``affine`` int32 [..., R], as
      `kvjax.ops.affine.Affine` reads them. Where a code lies on the border of two, implementations
      may take either, and the rows after it make good another error.

    Raises:
      ValueError: for another role, width, dtype or head dim, or an implementation that cannot take
        these arguments.
    """
    check(x, role, options.bits, options.meta_dtype)
    hadamard.check_dim(x.shape[-1])
    refusals = {"tpu": lambda: tpu.refusal(x), "gpu": lambda: gpu.refusal(x)}
    chosen = choose(NAME, implementation, refusals, (x, query))
    if chosen == "tpu":
        return tpu.heed_tile(x, role, options, query)
    if chosen == "gpu":
        return gpu.heed_tile(x, role, options, query)
    return heed.heed_tile(x, role, options, query)


def check(x: jax.Array, role: str, bits: int, meta_dtype: str) -> None:
    """Raises ValueError, naming the field, for what no implementation encodes."""
    if role not in ("key", "value"):
        raise ValueError(f"role={role!r} is unknown: choose 'key' or 'value'")
    packing.check_bits("bits", bits)
    packing.check_meta_dtype(meta_dtype)
    if x.ndim < 2 or x.shape[-1] % 2 or x.shape[-2] % 2:
        raise ValueError(f"x {x.shape} must be [..., C, D] with an even C and D")
