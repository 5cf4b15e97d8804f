"""The definition: one token after another, in float32.

    S_t = λ_t ⊙ S_{t-1} − erase_t ⊙ (S_{t-1} e_t) k_tᵀ + v_t k_tᵀ          S [V,K]

λ is a gate of each value row, of each key channel, or one for all; erase is a gate of each row;
e is the key itself or another. What is erased is read from the state before λ: a rule that decays
first (Gated DeltaNet) multiplies its erase gate, or its erase key, by λ. A write gate is a factor
of v. So one recurrence covers delta-mem (arXiv 2605.12357), DeltaNet (2406.06484), Gated DeltaNet
(2412.06464) and Kimi Delta Attention (2510.26692).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


@dataclass(frozen=True)
class Rule:
    """What is static about a scan.

    Attributes:
      per: "row" or "key", what the last axis of `decay` counts.
      read: "before" or "after" the token's own write.
    """

    per: str = "row"
    read: str = "before"


class Tokens(NamedTuple):
    """A run of tokens, all float32, time first: query, key [T,B,H,K], value [T,B,H,V], decay = ln λ
    [T,B,H,V] (or K, or 1), erase [T,B,H,V] (or 1), erase_key [T,B,H,K] or None for the key."""

    query: Array
    key: Array
    value: Array
    decay: Array
    erase: Array
    erase_key: Array | None = None


def step(rule: Rule, state: Array, token: Tokens) -> tuple[Array, Array]:
    """One token: state [B,H,V,K] -> the state after it and what it reads [B,H,V].

    Products and sums, no matrix products: at these sizes a product's call costs more than its work.
    """
    keep = jnp.exp(token.decay)
    keep = keep[..., None, :] if rule.per == "key" else keep[..., None]
    erase_key = token.key if token.erase_key is None else token.erase_key
    found = (state * erase_key[..., None, :]).sum(-1)
    new = keep * state + (token.value - token.erase * found)[..., None] * token.key[..., None, :]
    seen = state if rule.read == "before" else new
    return new, (seen * token.query[..., None, :]).sum(-1)


def recurrent(rule: Rule, state: Array, tokens: Tokens) -> tuple[Array, Array]:
    """All tokens in turn: the final state [B,H,V,K] and the reads [T,B,H,V]."""
    return lax.scan(lambda s, token: step(rule, s, token), state, tokens)
