"""Low-rank updates of frozen matrices (LoRA, arXiv 2106.09685): W + A·B, B zero at the start."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from jax import Array

A, B = ".lora_a", ".lora_b"


def add_lora(params: dict[str, Array], pattern: str, rank: int, seed: int = 0) -> dict[str, Array]:
    """The weights with A [in,rank] and B [rank,out] beside every matrix whose name matches.

    Raises:
      ValueError: for a rank below 1, or a pattern that matches no matrix.
    """
    found = [n for n, w in params.items() if w.ndim == 2 and re.search(pattern, n)]
    if rank < 1 or not found:
        raise ValueError(f"lora: rank {rank}, pattern {pattern!r} matches {len(found)} matrices; "
                         "use a rank of 1 or more and a pattern of their names")  # fmt: skip
    grown = dict(params)
    for key, name in zip(jax.random.split(jax.random.key(seed), len(found)), found, strict=True):
        inputs, outputs = params[name].shape
        grown[name + A] = jax.random.normal(key, (inputs, rank)) * inputs**-0.5
        grown[name + B] = jnp.zeros((rank, outputs))
    return grown


def fold(params: dict[str, Array]) -> dict[str, Array]:
    """The weights with their updates added and nothing beside them."""
    return {
        name: w + params[name + A] @ params[name + B] if name + A in params else w
        for name, w in params.items()
        if not name.endswith((A, B))
    }
