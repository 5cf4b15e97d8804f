"""How the TPU kernel walks over a cache: validated, chosen by device and shape."""

from __future__ import annotations

from dataclasses import dataclass

from jax.experimental.pallas import tpu as pltpu

SUBLANES, LANES = 8, 128
STEP_BYTES = 6 * 2**20  # tiles of one step, at most: a few steps are in VMEM at a time
OUT_BYTES = 8 * 2**20  # outputs of one program, at most: they stay in VMEM until it ends


@dataclass(frozen=True)
class Tpu:
    """The walk of the TPU kernel.

    Attributes:
      tiles: tiles that one step reads, of each of its heads.
      heads: KV heads that share one product, by a block-diagonal query: 1 or 2.
      splits: parts of the context that are read apart, and merged at the end.
      programs: parts of the batch, heads and splits: one for each core, or one after another.
    """

    tiles: int
    heads: int
    splits: int = 1
    programs: int = 1

    def __post_init__(self) -> None:
        for name in ("tiles", "heads", "splits", "programs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.heads > 2:
            raise ValueError(f"heads={self.heads} must be 1 or 2")

    def check(self, kv_heads: int, tiles: int) -> None:
        """Raises ValueError unless a cache of K heads and N tiles can be walked over so."""
        if kv_heads % self.heads:
            raise ValueError(f"heads={self.heads} must divide the {kv_heads} KV heads: choose 1")
        if self.tiles > tiles or (self.tiles < tiles and self.tiles % SUBLANES):
            raise ValueError(
                f"tiles={self.tiles} must be all {tiles} tiles, or fewer and a multiple of "
                f"{SUBLANES}"
            )


def tpu_blocks(
    batch: int, kv_heads: int, tiles: int, tile: int, tile_bytes: int, row_bytes: int, cores: int
) -> Tpu:
    """The walk over a cache.

    A step costs some 250 cycles beside its work, so it reads many tokens, but no more than leave
    several steps to run beside one another.

    Args:
      batch, kv_heads, tiles, tile: B, K, N, C.
      tile_bytes: of a tile, key and value together, of one KV head.
      row_bytes: of the output of one KV head of one row of the batch.
      cores: of the device.
    """
    heads = 2 if kv_heads % 2 == 0 else 1
    tokens = 8192 if tiles * tile >= 16384 else 4096
    if cores > 1 and tiles * tile >= 32768:
        tokens = 16384  # each core has half of the steps to hide that cost behind
    most = min(tokens // tile, STEP_BYTES // (heads * tile_bytes))
    step = min(tiles, max(SUBLANES, most // SUBLANES * SUBLANES))
    rows = batch * kv_heads // heads
    splits = min(cores if rows % cores else 1, -(-tiles // step))
    programs = max(cores, -(-rows * heads * splits * row_bytes // OUT_BYTES))
    return Tpu(step, heads, splits, min(programs, rows * splits))


def tpu_cores() -> int:
    """Cores of the TPU at hand, or of the one that an abstract mesh names; 1 where neither is."""
    try:
        return pltpu.get_tpu_info().num_cores
    except ValueError:
        return 1
