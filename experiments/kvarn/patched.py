"""An encoder of which some tokens are kept exact: those with the worst errors, or all the others.

This is no way to keep a cache (a tile holds its exact numbers besides its codes), but a question:
does the damage come from a few tokens that are far off, or from all tokens being a little off? The
KVarN paper (arXiv 2606.03458) asks it of KIVI with the worst 5 %.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.base import Encoder, Tile

WHICH = ("worst", "rest")


@dataclass(frozen=True)
class Patched(Encoder):
    """`inner`, with tokens of each tile and KV head made exact.

    Attributes:
      inner: the encoder, of the same tile.
      share: of a tile's tokens, those whose squared error is largest, rounded to whole tokens.
      which: `"worst"` makes these exact, `"rest"` all others.
    """

    inner: Encoder = Encoder()
    share: float = 0.05
    which: str = "worst"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1 or round(self.share * self.tile) < 1:
            raise ValueError(
                f"share={self.share} of tile={self.tile} must be 1 token or more and not all"
            )

    def validate(self, dim: int) -> None:
        self.inner.validate(dim)

    def rotate(self, x: jax.Array, role: str) -> jax.Array:
        return self.inner.rotate(x, role)

    def unrotate(self, x: jax.Array, role: str) -> jax.Array:
        return self.inner.unrotate(x, role)

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        """The inner leaves, `exact` [..., C, D] in the stored frame and `patched` bool [..., C]."""
        tile = self.inner.encode_tile(x, role)
        exact = self.rotate(x.astype(jnp.float32), role)
        error = jnp.square(self.inner.decode_tile(tile, role, x.shape[-1]) - exact).sum(-1)
        rank = jnp.argsort(jnp.argsort(-error, axis=-1), axis=-1)  # 0: the worst
        worst = rank < round(self.share * self.tile)
        return tile | {"exact": exact, "patched": worst if self.which == "worst" else ~worst}

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        inner = {name: x for name, x in tile.items() if name not in ("exact", "patched")}
        stored = self.inner.decode_tile(inner, role, dim)
        return jnp.where(tile["patched"][..., None], tile["exact"], stored)

    def tile_bytes(self, role: str, dim: int) -> int:
        return self.inner.tile_bytes(role, dim) + self.tile * (4 * dim + 1)
