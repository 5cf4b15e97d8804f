"""Block sizes of the kernels: validated, chosen by device kind and shape."""

from __future__ import annotations

from dataclasses import dataclass

SUBLANES, LANES = 8, 128
STEP_BYTES = 6 * 2**20  # of codes of one grid step of a TPU; two steps are in VMEM at a time


@dataclass(frozen=True)
class Tpu:
    """How the TPU kernel walks over a cache.

    Attributes:
      tiles: tiles that one grid step reads, of each of its heads.
      heads: KV heads that share one product, by a block-diagonal query: 1 or 2.
      run: tiles under one maximum. Runs of a step do not wait for one another.
      splits: parts of the context that are read apart, and merged at the end.
      chunks: programs that the walk is dealt to, one after another or one for each core.
    """

    tiles: int
    heads: int
    run: int
    splits: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("tiles", "heads", "run", "splits", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.heads > 2:
            raise ValueError(f"heads={self.heads} must be 1 or 2")

    def check(self, kv_heads: int, tiles: int) -> None:
        """Raises ValueError unless a cache of [B,K,N,…] can be walked over so."""
        if kv_heads % self.heads:
            raise ValueError(f"heads={self.heads} must divide the {kv_heads} KV heads: choose 1")
        if self.tiles > tiles or (self.tiles < tiles and self.tiles % SUBLANES):
            raise ValueError(
                f"tiles={self.tiles} must be all {tiles} tiles, or fewer and a multiple of "
                f"{SUBLANES}"
            )


def tpu_blocks(batch: int, kv_heads: int, tiles: int, tile: int, bytes: int, cores: int) -> Tpu:
    """The walk over a cache of `tiles` tiles of `tile` tokens.

    A step has a fixed cost of some 500 cycles, so it reads as many tokens as are left to make
    several steps of, up to `STEP_BYTES`.

    Args:
      batch, kv_heads: B, K.
      bytes: of one tile's codes, key and value together, of one KV head.
      cores: of the device.
    """
    heads = 2 if kv_heads % 2 == 0 else 1
    tokens = 8192 if tiles * tile >= 16384 else 4096
    most = min(tokens // tile, STEP_BYTES // (heads * bytes))
    step = min(tiles, max(SUBLANES, most // SUBLANES * SUBLANES))
    run = max(1, 1024 // tile)
    splits = cores if (batch * kv_heads // heads) % cores else 1
    return Tpu(step, heads, run, min(splits, -(-tiles // step)), cores)
