"""The orthonormal Hadamard rotation, which spreads outlier channels over the whole head."""

import jax
import jax.numpy as jnp
from jax import lax


def check_dim(dim: int) -> None:
    """Raises ValueError unless ``dim`` is a power of two: Sylvester's matrix has no other size."""
    if dim < 2 or dim & (dim - 1):
        raise ValueError(
            f"head_dim={dim} is no power of two, so it has no Hadamard rotation: "
            "use rtn or int8, or kvarn(rotate=False)"
        )


def hadamard_matrix(dim: int) -> jax.Array:
    """Sylvester's H / sqrt(dim), float32 [dim, dim]: symmetric and its own inverse.

    It is computed, not stored (entry (i, j) is -1 to the number of bits that i and j share), so
    that a compiled program does not carry one copy per layer.
    """
    check_dim(dim)
    i = lax.broadcasted_iota(jnp.uint32, (dim, dim), 0)
    j = lax.broadcasted_iota(jnp.uint32, (dim, dim), 1)
    odd = lax.population_count(i & j) & 1
    return jnp.where(odd == 1, -(dim**-0.5), dim**-0.5).astype(jnp.float32)


def rotate(x: jax.Array) -> jax.Array:
    """x @ H on the last axis, in float32 whatever the dtype of x. Its own inverse."""
    matrix = hadamard_matrix(x.shape[-1])
    return jnp.matmul(x.astype(jnp.float32), matrix, precision=lax.Precision.HIGHEST)
