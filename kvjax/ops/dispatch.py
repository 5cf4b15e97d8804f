"""Which implementation of an op runs: the kernel of the device at hand, or the plain reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

IMPLEMENTATIONS = ("reference", "tpu", "gpu")
BACKENDS = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}


def choose(
    op: str, implementation: str | None, refusals: Mapping[str, Callable[[], str]]
) -> str:
    """The implementation to run.

    Args:
      op: the op's name, for messages.
      implementation: one of `IMPLEMENTATIONS`; None: the kernel of the default backend where it
        takes these arguments, else the reference.
      refusals: kernel -> a function that says why it cannot take these arguments, "" if it can.

    Raises:
      ValueError: for an unknown implementation, or one that cannot take these arguments.
    """
    if implementation is None:
        kernel = BACKENDS.get(jax.default_backend(), "reference")
        return kernel if kernel in refusals and not refusals[kernel]() else "reference"
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


def gpu_cores() -> int:
    """Streaming multiprocessors of the GPU at hand; where there is none (ahead of time), an
    H100's."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 132
