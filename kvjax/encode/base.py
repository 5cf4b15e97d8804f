"""What every encoder does: turn a full tile of keys or values into few bits, and back.

The cache only ever encodes whole tiles of ``tile`` tokens, once, and stores what ``encode_tile``
returns. An encoder that rotates does so in ``encode_tile``; what ``decode_tile`` gives back is in
the stored (rotated) frame, so a reader rotates its few queries and un-rotates its few outputs
rather than every cached token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.ops.affine import Affine, Tile

ROLES = ("key", "value")


def check_role(role: str) -> None:
    """Raises ValueError unless ``role`` is "key" or "value"."""
    if role not in ROLES:
        raise ValueError(f"role={role!r} is unknown: choose one of {ROLES}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Encoded keys and values of N tiles: leaves [B, K, N, ...], as the cache stores them."""

    key: Tile
    value: Tile
    encoder: Encoder = field(metadata={"static": True})
    dim: int = field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


@dataclass(frozen=True)
class Encoder:
    """Base of the encoders; hashable, so that it is static under ``jit``.

    Attributes:
      tile: tokens encoded together (C).
      key_by_channel: whether keys are stored channels first, so that reading them as [D, C] saves
        a transpose. Speed alone depends on it.
    """

    tile: int = 128
    key_by_channel: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.tile < 2 or self.tile % 2:
            raise ValueError(f"tile={self.tile} must be an even number >= 2, such as 64 or 128")

    def validate(self, dim: int) -> None:
        """Raises ValueError, naming field and remedy, where ``head_dim=dim`` cannot be encoded."""
        if dim < 1:
            raise ValueError(f"head_dim={dim} must be positive")

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        """Encodes x [..., C, D] (any float dtype, original frame); leaves keep the leading axes."""
        raise NotImplementedError

    @property
    def reads_queries(self) -> bool:
        """Whether keys are encoded by ``encode_tile_for``: the cache then keeps the queries of its
        exact tokens until their tile is full."""
        return False

    def encode_tile_for(self, x: jax.Array, role: str, query: jax.Array | None) -> Tile:
        """``encode_tile`` with the queries [..., n, D] (original frame) of the tile's tokens and
        of all heads that read this kv head; None for values."""
        return self.encode_tile(x, role)

    def decode_tile(self, tile: Tile, role: str, dim: int) -> jax.Array:
        """The float32 [..., C, D] that ``tile`` stands for, in the stored frame."""
        raise NotImplementedError

    def unpack_tile(self, tile: Tile, role: str, dim: int) -> Tile:
        """Plain codes and float32 scales of ``tile``, for comparison with reference data."""
        raise NotImplementedError

    def tile_bytes(self, role: str, dim: int) -> int:
        """Bytes of one encoded tile of one kv head: what the arrays of ``encode_tile`` take."""
        raise NotImplementedError

    def affine(self) -> Affine | None:
        """The format that kernels read, where this encoder's tiles have it."""
        return None

    @property
    def keeps_values(self) -> bool:
        """Whether each of the newest ``tile`` values is read exact though its tile is encoded.

        The cache needs no room for it: the exact slots hold a token until that ``tile`` places
        later overwrites it.
        """
        return False

    def bits_per_element(self, role: str, dim: int) -> float:
        """Bits that one of the C * D numbers of a tile takes, scales and padding included."""
        return 8 * self.tile_bytes(role, dim) / (self.tile * dim)

    def rotate(self, x: jax.Array, role: str) -> jax.Array:
        """Original frame to stored frame, on the last axis."""
        return x

    def unrotate(self, x: jax.Array, role: str) -> jax.Array:
        """Stored frame to original frame, on the last axis."""
        return x

    def encode(self, k: jax.Array, v: jax.Array) -> Tiles:
        """Encodes k and v [B, S, K, D]; S must be a multiple of ``tile``.

        Tiles are encoded one after another, so that a whole text and the same text tile by tile
        give the same bits.
        """
        if k.shape != v.shape or len(k.shape) != 4:
            raise ValueError(f"k {k.shape} and v {v.shape} must both be [B, S, K, D]")
        if k.shape[1] % self.tile:
            raise ValueError(
                f"length {k.shape[1]} is not a multiple of tile={self.tile}: keep the rest exact, "
                "or choose another tile"
            )
        self.validate(k.shape[-1])
        return Tiles(
            key=_encode_stream(self, jnp.asarray(k), "key"),
            value=_encode_stream(self, jnp.asarray(v), "value"),
            encoder=self,
            dim=k.shape[-1],
        )

    def decode(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        """Keys and values as float32 [B, S, K, D] in the original frame."""
        return (
            _decode_stream(self, tiles.key, "key", tiles.dim),
            _decode_stream(self, tiles.value, "value", tiles.dim),
        )

    def unpack(self, tiles: Tiles) -> dict[str, Tile]:
        """``unpack_tile`` of the keys and of the values: leaves [B, K, N, ...]."""
        return {
            "key": self.unpack_tile(tiles.key, "key", tiles.dim),
            "value": self.unpack_tile(tiles.value, "value", tiles.dim),
        }

    def check_tile(self, x: jax.Array, role: str) -> None:
        """Raises ValueError unless x is [..., C, D] of a dim and a role that can be encoded."""
        check_role(role)
        if x.ndim < 2 or x.shape[-2] != self.tile:
            raise ValueError(f"a tile must be [..., {self.tile}, head_dim], not {x.shape}")
        self.validate(x.shape[-1])


@partial(jax.jit, static_argnums=(0, 2))
def _encode_stream(encoder: Encoder, x: jax.Array, role: str) -> Tile:
    batch, length, heads, dim = x.shape
    tiles = x.reshape(batch, length // encoder.tile, encoder.tile, heads, dim)
    tiles = tiles.transpose(1, 0, 3, 2, 4)  # [N, B, K, C, D]
    encoded: Any = lax.map(lambda t: encoder.encode_tile(t, role), tiles)
    return {name: jnp.moveaxis(leaf, 0, 2) for name, leaf in encoded.items()}


@partial(jax.jit, static_argnums=(0, 2, 3))
def _decode_stream(encoder: Encoder, tile: Tile, role: str, dim: int) -> jax.Array:
    x = encoder.unrotate(encoder.decode_tile(tile, role, dim), role)  # [B, K, N, C, D]
    batch, heads, num_tiles, tokens, _ = x.shape
    return x.reshape(batch, heads, num_tiles * tokens, dim).swapaxes(1, 2)
