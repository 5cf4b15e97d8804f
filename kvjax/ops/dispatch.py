"""Which implementation of an op runs: the kernel of the device at hand, or the plain reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

IMPLEMENTATIONS = ("reference", "tpu", "gpu")
BACKENDS = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}


def choose(
    op: str,
    implementation: str | None,
    refusals: Mapping[str, Callable[[], str]],
    arguments: Any = (),
) -> str:
    """The implementation to run.

    Args:
      op: the op's name, for messages.
      implementation: one of `IMPLEMENTATIONS`; None: the kernel of the default backend where it
        takes these arguments and these are not `partitioned`, else the reference.
      refusals: kernel -> a function that says why it cannot take these arguments, "" if it can.
      arguments: a tree of the arrays that the op works on.

    Raises:
      ValueError: for an unknown implementation, or one that cannot take these arguments.
    """
    if implementation is None:
        kernel = BACKENDS.get(jax.default_backend(), "reference")
        if kernel not in refusals or partitioned(arguments) or refusals[kernel]():
            return "reference"
        return kernel
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation={implementation!r} is unknown: choose one of {IMPLEMENTATIONS}"
        )
    if implementation == "reference":
        return implementation
    reason = refusals[implementation]() if implementation in refusals else "there is no such kernel"
    if reason:
        raise ValueError(
            f"{op}: implementation={implementation!r} cannot run here: {reason}; "
            "leave implementation at None, or use 'reference'"
        )
    return implementation


def partitioned(arguments: Any) -> bool:
    """Whether the compiler is to split these arrays over several devices, which it cannot do with a
    kernel.

    While a function is traced, an array knows the mesh on which it, or anything it was computed
    from, lies, and `jax.set_mesh` tells it of all. Inside `jax.shard_map` over all axes of a mesh
    each device works by itself, so kernels run there. Not seen: shardings given to `jax.jit` alone,
    and the carry of a loop that began on no mesh; there, lowering a kernel says that it cannot be
    partitioned, and implementation="reference" helps.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arguments)]
    return any(_shared(mesh) > 1 for mesh in [jax.sharding.get_abstract_mesh(), *meshes])


def _shared(mesh: Any) -> int:
    """Over how many devices of a mesh the compiler splits."""
    return math.prod(n for axis, n in mesh.shape.items() if axis not in mesh.manual_axes)


def gpu_cores() -> int:
    """Streaming multiprocessors of the GPU at hand; where there is none (ahead of time), an
    H100's."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 132
