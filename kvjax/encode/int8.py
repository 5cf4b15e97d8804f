"""Eight bits per number, one symmetric scale per token and head: the common baseline.

The code is rounded. Public kernels that store a float into int8 truncate and double the error.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax.encode.per_token import PerToken


@dataclass(frozen=True)
class Int8(PerToken):
    """Holds ``codes`` int8 [..., C, D] and ``scale`` float32 [..., C]; see :func:`int8`."""

    def largest(self) -> float:
        return 127.0

    def to_codes(self, x: jax.Array) -> jax.Array:
        return jnp.round(x).astype(jnp.int8)


def int8(tile: int = 128) -> Int8:
    """Symmetric int8 per token and head: ``scale = max(absmax / 127, 1e-6)``, code rounded.

    Raises:
      ValueError: for an odd tile.
    """
    return Int8(tile=tile)
