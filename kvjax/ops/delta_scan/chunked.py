"""The exact chunked form: within a chunk, one triangular system instead of one token after another.

With u_t = v_t − erase_t ⊙ (S_{t-1} e_t), what a token really adds, the state is a decayed sum,

    S_t = Λ(0..t) S_0 + Σ_{s≤t} Λ(s..t) u_s k_sᵀ,        Λ(s..t) = Π_{s<j≤t} λ_j,

and u solves (I + A) u = v − erase ⊙ (Λ(0..t-1) S_0 e_t) with A[t,s] = erase_t Λ(s..t-1) (e_t · k_s)
below the diagonal (DeltaNet's form, arXiv 2406.06484 §3; with a gate of each row there is one
system a row). Every Λ comes from its own sum of logarithms: a difference of two cumulative sums
would cancel, and its exponential overflow, where decay is strong.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.ops.delta_scan.reference import Rule, Tokens


def chunk(rule: Rule, state: Array, tokens: Tokens) -> tuple[Array, Array]:
    """As `recurrent`, for C tokens at once; C is a power of two."""
    q, k, v, decay, erase = (jnp.moveaxis(x, 0, 2) for x in tokens[:5])  # [B,H,C,*]
    e = k if tokens.erase_key is None else jnp.moveaxis(tokens.erase_key, 0, 2)
    upto, before = _pair_decays(decay)  # [B,H,G,C,1+C]
    when = before if rule.read == "before" else upto
    mixed = _Mixed(rule, state, k)
    own = jnp.tril(mixed.pairs(e, before), -1) * _rows(erase)[..., None]  # [B,H,V|1,C,C]
    wanted = _rows(v) - _rows(erase) * mixed.start(e, before)  # [B,H,V,C]
    added = _dot("bhvts,bhvs->bhvt", unit_lower_inverse(own), wanted)
    pairs = jnp.tril(mixed.pairs(q, when), -1 if rule.read == "before" else 0)
    reads = mixed.start(q, when) + _dot("bhvts,bhvs->bhvt", pairs, added)
    return mixed.end(added, upto), jnp.moveaxis(reads, 3, 0)


class _Mixed:
    """Products of tokens with the chunk's keys and first state, under decays of rows or keys."""

    def __init__(self, rule: Rule, state: Array, key: Array) -> None:
        self.by_key, self.state, self.key = rule.per == "key", state, key

    def pairs(self, x: Array, decays: Array) -> Array:
        """x_t · k_s under Λ(s..t): x [B,H,C,K] -> [B,H,V|1,C,C]."""
        within = decays[..., 1:]
        if self.by_key:
            return _dot("bhtd,bhsd,bhdts->bhts", x, self.key, within)[:, :, None]
        return _dot("bhtd,bhsd->bhts", x, self.key)[:, :, None] * within

    def start(self, x: Array, decays: Array) -> Array:
        """What token t finds at x_t of the first state: [B,H,V,C]."""
        whole = decays[..., 0]  # [B,H,G,C]
        if self.by_key:
            return _dot("bhvd,bhtd,bhdt->bhvt", self.state, x, whole)
        return _dot("bhvd,bhtd->bhvt", self.state, x) * whole

    def end(self, added: Array, upto: Array) -> Array:
        """The state after the chunk, from what each token added [B,H,V,C]."""
        last = upto[..., -1, :]  # [B,H,G,1+C]
        if self.by_key:
            keys = self.key * last[..., 1:].swapaxes(2, 3)
            return self.state * last[..., None, :, 0] + _dot("bhvs,bhsd->bhvd", added, keys)
        kept = self.state * last[..., :1]
        return kept + _dot("bhvs,bhsd->bhvd", added * last[..., 1:], self.key)


def _pair_decays(decay: Array) -> tuple[Array, Array]:
    """Λ(s..t) and Λ(s..t-1) for s = -1 (the chunk's start) … C-1: decay [B,H,C,G] ->
    [B,H,G,C,1+C] each; 1 where s ≥ t, which callers cut away."""
    log = decay.swapaxes(2, 3)[..., None]  # [B,H,G,C,1]
    size = log.shape[3]
    after = jnp.arange(size)[:, None] > jnp.arange(-1, size)
    sums = jnp.cumsum(jnp.where(after, log, 0.0), axis=3)
    shifted = jnp.pad(sums, ((0, 0), (0, 0), (0, 0), (1, 0), (0, 0)))[..., :-1, :]
    return jnp.exp(sums), jnp.exp(shifted)


@jax.custom_vjp
def unit_lower_inverse(a: Array) -> Array:
    """(I + A)⁻¹ for A [...,C,C] strictly lower triangular, C a power of two.

    Two halves at a time, [[X, 0], [−Y A₂₁ X, Y]] from the inverses X and Y of the diagonal blocks:
    log₂ C rounds of matrix products, as exact as substitution.
    """
    size = a.shape[-1]
    inverse = jnp.ones((*a.shape[:-2], size, 1, 1), a.dtype)
    half = 1
    while half < size:
        pairs = size // (2 * half)
        blocks = a.reshape(*a.shape[:-2], pairs, 2, half, pairs, 2, half)
        lower = jnp.moveaxis(jnp.diagonal(blocks[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        halves = inverse.reshape(*a.shape[:-2], pairs, 2, half, half)
        x, y = halves[..., 0, :, :], halves[..., 1, :, :]
        corner = -_dot("...ij,...jk,...kl->...il", y, lower, x)
        top = jnp.concatenate([x, jnp.zeros_like(x)], -1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, y], -1)], -2)
        half *= 2
    return inverse[..., 0, :, :]


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: Array, wanted: Array) -> tuple[Array]:
    """d(X) = −X dA X: two products instead of all the rounds backwards."""
    return (-jnp.tril(_dot("...ji,...jk,...lk->...il", inverse, wanted, inverse), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _rows(x: Array) -> Array:
    """[B,H,C,V|1] -> [B,H,V|1,C]."""
    return x.swapaxes(2, 3)


def _dot(spec: str, *operands: Array) -> Array:
    return jnp.einsum(spec, *operands, precision=lax.Precision.HIGHEST)
