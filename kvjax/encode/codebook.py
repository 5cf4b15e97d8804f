"""The best 2^b numbers to stand for a normal one (Lloyd 1957, Max 1960), and look-up in them."""

from functools import cache
from math import inf
from statistics import NormalDist

import jax
import jax.numpy as jnp

WIDTHS = (1, 2, 3, 4)


def check_bits(field: str, bits: int) -> None:
    """Raises ValueError, naming ``field``, unless there is a codebook of ``bits`` bits."""
    if bits not in WIDTHS:
        raise ValueError(
            f"{field}={bits!r} has no codebook: choose one of {WIDTHS}, or rtn or int8 for more"
        )


@cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2^bits centroids of N(0, 1), rising, to 1e-10.

    Each is the mean of the normal distribution between the midpoints to its neighbours.
    """
    check_bits("bits", bits)
    normal, count = NormalDist(), 2**bits
    centroids = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    moved = 1.0
    while moved > 1e-10:
        edges = [-inf, *midpoints(tuple(centroids)), inf]
        # An infinite edge has density 0, which NormalDist.pdf knows.
        means = [
            (normal.pdf(a) - normal.pdf(b)) / (normal.cdf(b) - normal.cdf(a))
            for a, b in zip(edges, edges[1:], strict=False)
        ]
        moved = max(abs(new - old) for new, old in zip(means, centroids, strict=True))
        centroids = means
    return tuple(centroids)


def midpoints(centroids: tuple[float, ...]) -> tuple[float, ...]:
    """Where the nearest centroid changes."""
    return tuple((a + b) / 2 for a, b in zip(centroids, centroids[1:], strict=False))


def nearest(x: jax.Array, centroids: tuple[float, ...]) -> jax.Array:
    """int32 index of the centroid nearest to each number: how many midpoints it has reached.

    Comparisons and selections instead of a search and a gather, which do not fuse.
    """
    index = jnp.zeros(x.shape, jnp.int32)
    for edge in midpoints(centroids):
        index = index + (x >= jnp.float32(edge)).astype(jnp.int32)
    return index


def look_up(index: jax.Array, centroids: tuple[float, ...]) -> jax.Array:
    """float32 centroids of int32 indices."""
    x = jnp.full(index.shape, centroids[0], jnp.float32)
    for i, centroid in enumerate(centroids[1:], start=1):
        x = jnp.where(index >= i, jnp.float32(centroid), x)
    return x
