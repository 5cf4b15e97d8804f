"""What int8 and fp8 share: one byte per number, one symmetric scale per token and head."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.base import Encoder, Tile, check_role
from kvjax.ops.rounding import divide


@dataclass(frozen=True)
class PerToken(Encoder):
    """Holds ``codes`` of one byte [..., C, D] and ``scale`` float32 [..., C]."""

    def largest(self) -> float:
        """The code of a token's largest number."""
        raise NotImplementedError

    def to_codes(self, x: jax.Array) -> jax.Array:
        """Float32 numbers within the largest code, as codes."""
        raise NotImplementedError

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        self.check_tile(x, role)
        x, largest = x.astype(jnp.float32), self.largest()
        # The floor keeps the scale of a zero token positive; its codes are 0 all the same.
        scale = jnp.maximum(divide(jnp.abs(x).max(axis=-1), jnp.float32(largest)), 1e-6)
        codes = jnp.clip(x * (1 / scale[..., None]), -largest, largest)
        return {"codes": self.to_codes(codes), "scale": scale}

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """``codes`` [..., C, D], ``scale`` float32 [..., C]: what is stored."""
        check_role(role)
        return tile

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        check_role(role)
        return tile["codes"].astype(jnp.float32) * tile["scale"][..., None]

    def tile_bytes(self, role: str, dim: int) -> int:
        check_role(role)
        return self.tile * dim + 4 * self.tile
