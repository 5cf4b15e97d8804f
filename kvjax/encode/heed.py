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

*Sweeps.* A channel rounded early knew nothing of the errors after it. So each is rounded again, in
the same order, to what is best given all the others, k_i + Σ_{j≠i} C_ij e_j / C_ii, under the scale
it has, which is refitted to the new codes: coordinate descent on Σ_t e_tᵀ C e_t.

*C* is estimated when a tile is full, from the queries of the tile's own tokens, all heads of a KV
head's group. They are few, and the queries that will single a token out are not among them: those
resemble the keys. So C is the mean of the queries' second moment and the keys' own covariance,
each at a mean diagonal of 1, and 5 % is added to the diagonal.

*Values.* The output's error is Σ_t p_t e_t. Attention spreads over a tile, so errors of one sign
add up: E[p pᵀ] is taken as proportional to I + μ 1 1ᵀ, and the same factorisation gives token t of
the tile's C the target v_t + μ / (1 + μ (C − t)) Σ_{s<t} e_s, which steers the sum of the errors to
zero.
"""

from dataclasses import dataclass

import jax

from kvjax.encode.base import Tile
from kvjax.encode.hadamard_rtn import Rotated
from kvjax.ops.encode_tile.api import heed_tile
from kvjax.ops.encode_tile.heed import Heed as Options


@dataclass(frozen=True)
class Heed(Rotated):
    """Fitted tiles; see :func:`heed`. Holds what Rtn holds."""

    key_bits: int = 2
    value_bits: int = 2
    feedback: bool = True
    sweeps: int = 2
    own_share: float = 0.5
    coupling: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sweeps < 0:
            raise ValueError(f"sweeps={self.sweeps} must be 0 or more, such as 2")
        if not 0 <= self.own_share <= 1:
            raise ValueError(f"own_share={self.own_share} must be from 0 to 1, such as 0.5")
        if not 0 <= self.coupling <= 1:
            raise ValueError(f"coupling={self.coupling} must be from 0 (none) to 1, such as 0.05")

    @property
    def reads_queries(self) -> bool:
        return self.feedback

    def encode_tile(self, x: jax.Array, role: str) -> Tile:
        return self.encode_tile_for(x, role, None)

    def encode_tile_for(self, x: jax.Array, role: str, query: jax.Array | None) -> Tile:
        self.check_tile(x, role)
        return heed_tile(x, role, self.options(role), query)

    def options(self, role: str) -> Options:
        """How tiles of one role are encoded."""
        return Options(
            self.bits(role),
            self.meta_dtype,
            self.feedback,
            self.sweeps,
            self.own_share,
            self.coupling,
        )


def heed(
    key_bits: int = 2,
    value_bits: int = 2,
    tile: int = 128,
    meta_dtype: str = "float16",
    feedback: bool = True,
    sweeps: int = 2,
    own_share: float = 0.5,
    coupling: float = 0.05,
) -> Heed:
    """Least-squares rows and query-aware error feedback; the head dim is a power of two.

    The exact window keeps the queries of its tokens beside their keys and values, in bfloat16:
    `tile` queries a head, whatever the context.

    Args:
      key_bits, value_bits: 1, 2, 3, 4 or 8.
      tile: tokens encoded together, even. 64 rather than 128 takes 0.125 bits an element more and
        is the better buy at every width (`results/kvarn`): C and the ranges are then fresher. But
        GPU kernels want 128, and a TPU pads rows of 64 to its 128 lanes: there, at head_dim 128
        and 2 bits, tiles of 64 take 3.5 bits an element and not 2.5.
      meta_dtype: "float16" or "bfloat16", for scales and zeros. Codes are chosen for the scales as
        stored.
      feedback: False fits each row by itself; then no queries are kept.
      sweeps: how often all key channels are rounded again.
      own_share: share of the keys' own covariance in C; 0 takes the queries alone.
      coupling: μ, how much the errors of a tile's value tokens add up; 0 fits each by itself.

    Raises:
      ValueError: for another width, tile, dtype, sweeps, own_share or coupling; on use, for a head
        dim that cannot be rotated.
    """
    return Heed(
        tile=tile,
        key_bits=key_bits,
        value_bits=value_bits,
        meta_dtype=meta_dtype,
        feedback=feedback,
        sweeps=sweeps,
        own_share=own_share,
        coupling=coupling,
    )
