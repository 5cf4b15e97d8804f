"""Heed: rows fitted by least squares, keys with error feedback that heeds the queries.

The tile is the plainest there is, a scale and a zero per key channel and per value token, so the
reader of the cache is the one of round-to-nearest. All the work is done once, at encoding:

*Frame.* Keys and values are turned by a Hadamard matrix, as in QuaRot and KVarN.

*Row fit.* A row of M numbers is cut to five shares of its range and rounded; each time scale and
zero are refitted to the codes by least squares, and the best of the five is kept. At two bits the
best range of a normal row is some 60 % of its extremes.

*Keys.* A key's error e = k − k̂ matters only through the scores of queries yet to come, so what has
to be small is E[(q·e)²] = eᵀ C e with C = E[q qᵀ], not ‖e‖². Few channels of C carry most of its
power, and neighbours are correlated. Write C = F Δ Fᵀ with F unit upper triangular. Then

    eᵀ C e = Σ_i Δ_i (e_i + Σ_{j<i} F_ji e_j)²,

and the channels can be rounded one after another, channel i to the nearest of k_i + Σ_{j<i} F_ji
e_j: the errors already made are made good by the channels still to come. This is the update of
GPTQ (arXiv 2210.17323) and LDLQ (arXiv 2307.13304), with queries in the place of activations and
a tile's channels in the place of a weight's columns. Channels go in the order of falling C_ii, so
that those that matter most are rounded while many are left to compensate. A channel's row of tokens
is fitted as above, to its targets, so that scale and zero serve the feedback too.

C is estimated when a tile is full, from the queries of the tile's own tokens, all heads of a KV
head's group. A cached key meets queries from further and further on, whose RoPE angle has moved, so
the mean runs over the same queries turned to 0, h/8, h/4, h/2 and h tokens on, h the horizon: this
takes off a quarter of the remaining key error. 5 % of the mean diagonal is added.

*Values.* The output's error is Σ_t p_t e_t. Attention spreads over a tile, so errors of one sign
add up: E[p pᵀ] is taken as proportional to I + μ 1 1ᵀ, and the same factorisation gives token t of
the tile's C the target v_t + μ / (1 + μ (C − t)) Σ_{s<t} e_s, which steers the sum of the errors to
zero.
"""

from dataclasses import dataclass

import jax

from kvjax.encode.base import Tile
from kvjax.encode.rtn import Rtn
from kvjax.ops import hadamard
from kvjax.ops.encode_tile.api import heed_tile
from kvjax.ops.encode_tile.heed import Heed as Options


@dataclass(frozen=True)
class Heed(Rtn):
    """Fitted tiles; see :func:`heed`. Holds what Rtn holds."""

    key_bits: int = 2
    value_bits: int = 2
    feedback: bool = True
    horizon: int = 1024
    coupling: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.horizon < 0:
            raise ValueError(f"horizon={self.horizon} must be 0 or more tokens, such as 1024")
        if not 0 <= self.coupling <= 1:
            raise ValueError(f"coupling={self.coupling} must be from 0 (none) to 1, such as 0.05")

    def validate(self, dim: int) -> None:
        super().validate(dim)
        hadamard.check_dim(dim)

    def rotate(self, x: jax.Array, role: str) -> jax.Array:
        return hadamard.rotate(x)

    def unrotate(self, x: jax.Array, role: str) -> jax.Array:
        return hadamard.rotate(x)

    @property
    def query_offsets(self) -> tuple[int, ...]:
        if not self.feedback:
            return ()
        ahead = {self.horizon // 8, self.horizon // 4, self.horizon // 2, self.horizon}
        return tuple(sorted({0} | ahead))

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        return self.encode_tile_for(x, role, None)

    def encode_tile_for(self, x: jax.Array, role: str, query: jax.Array | None) -> Tile:
        self.check_tile(x, role)
        options = Options(self.bits(role), self.meta_dtype, self.feedback, self.coupling)
        return heed_tile(x, role, options, query)


def heed(
    key_bits: int = 2,
    value_bits: int = 2,
    tile: int = 128,
    meta_dtype: str = "float16",
    feedback: bool = True,
    horizon: int = 1024,
    coupling: float = 0.05,
) -> Heed:
    """Least-squares rows and query-aware error feedback; the head dim is a power of two.

    The exact window keeps the queries of its tokens beside their keys and values: `tile` queries a
    head, whatever the context.

    Args:
      key_bits, value_bits: 1, 2, 3, 4 or 8.
      tile: tokens encoded together, even.
      meta_dtype: "float16" or "bfloat16", for scales and zeros. Codes are chosen for the scales as
        stored.
      feedback: False fits each row by itself; then no queries are kept.
      horizon: how many tokens on the queries are turned at most; 0 takes them as they are.
      coupling: μ, how much the errors of a tile's value tokens add up; 0 fits each by itself.

    Raises:
      ValueError: for another width, tile, dtype, horizon or coupling; on use, for a head dim that
        cannot be rotated.
    """
    return Heed(
        tile=tile,
        key_bits=key_bits,
        value_bits=value_bits,
        meta_dtype=meta_dtype,
        feedback=feedback,
        horizon=horizon,
        coupling=coupling,
    )
