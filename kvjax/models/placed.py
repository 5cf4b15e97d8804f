"""Where activations lie while a model is trained on a mesh."""

from __future__ import annotations

import math

import jax
from jax import Array
from jax.sharding import PartitionSpec

ROWS = ("data", "fsdp")  # the axes of a training mesh that split a batch


def by_rows(x: Array) -> Array:
    """`x` [B, …] with its rows kept apart over the axes "data" and "fsdp" of the mesh in context.

    Weights are split over "fsdp" too. Where a product meets both, the compiler may gather either;
    told where activations lie, it gathers one layer's weights at a time. Without such a mesh, or
    where B does not divide, `x` as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in ROWS if axis in mesh.axis_names)
    if not axes or x.shape[0] % math.prod(mesh.shape[axis] for axis in axes):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))
