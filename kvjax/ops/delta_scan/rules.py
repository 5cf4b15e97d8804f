"""The delta rules of linear-attention layers, in their own conventions, on the one scan.

q, k [B,T,H,K], v [B,T,HV,V], state [B,HV,K,V]: keys are the state's rows here, and a token reads
after its write. Query and key heads are repeated for groups of value heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.ops.delta_scan.api import delta_scan


def gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    decay: Array | None = None,
    state: Array | None = None,
    *,
    erase: Array | None = None,
    scale: float | None = None,
    form: str | None = None,
) -> tuple[Array, Array]:
    """S ← λ S, S ← S + k (β (v − Sᵀ k))ᵀ, o = scale · Sᵀ q.

    Args:
      query, key: [B,T,H,K], normalised by the caller.
      value: [B,T,HV,V], HV a multiple of H.
      beta: [B,T,HV], how much of the difference is written; in the variant with `erase` a gate
        of each value channel [B,T,HV,V], which scales v alone.
      decay: ln λ. None: no decay (DeltaNet, arXiv 2406.06484); [B,T,HV]: Gated DeltaNet
        (2412.06464); [B,T,HV,K], a gate of each key channel: Kimi Delta Attention (2510.26692).
      state: [B,HV,K,V], the initial state; None: zeros.
      erase: [B,T,HV,K] or [B,T,H,K], a gate of each key channel on what is erased; the rule is
        then S + k (β v − Sᵀ (erase · k))ᵀ. None: the rule above.
      scale: of the output; None: K^-0.5.
      form: see `delta_scan`.

    Returns:
      o [B,T,HV,V] and the final state [B,HV,K,V], float32.

    Raises:
      ValueError: where shapes do not fit.
    """
    heads, groups = value.shape[2], value.shape[2] // key.shape[2]
    query, key = (jnp.repeat(x.astype(jnp.float32), groups, 2) for x in (query, key))
    dim = key.shape[-1]
    decay = jnp.zeros(value.shape[:3]) if decay is None else decay
    by_key = decay.ndim == 4
    log = decay if by_key else decay[..., None]
    # The erasing key meets the state before its decay.
    erase_key = jnp.exp(log) * key if erase is None else jnp.exp(log) * erase * key
    gate = beta[..., None] if erase is None else beta
    if state is None:
        state = jnp.zeros((value.shape[0], heads, dim, value.shape[-1]), jnp.float32)
    found, final = delta_scan(
        state.swapaxes(2, 3), query, key, gate * value, log,
        gate if erase is None else jnp.ones_like(gate[..., :1]), erase_key,
        per="key" if by_key else "row", read="after", form=form,
    )  # fmt: skip
    return found * (dim**-0.5 if scale is None else scale), final.swapaxes(2, 3)


def log_decay(
    x: Array, log_rate: Array, bias: Array, lower_bound: float | None = None
) -> Array:
    """ln λ from a layer's projection: −exp(rate) · softplus(x + bias), or with a lower bound b < 0
    b · sigmoid(exp(rate) · (x + bias)).

    Args:
      x: [B,T,H] (Gated DeltaNet) or [B,T,H,K] (Kimi Delta Attention).
      log_rate: [H], the layer's `A_log`.
      bias: the layer's `dt_bias`, [H] or [H·K].
      lower_bound: the least ln λ; None: the unbounded form.
    """
    rate = jnp.exp(log_rate.astype(jnp.float32))
    rate = rate[:, None] if x.ndim == 4 else rate
    x = x.astype(jnp.float32) + bias.reshape(x.shape[2:])
    if lower_bound is None:
        return -rate * jax.nn.softplus(x)
    return lower_bound * jax.nn.sigmoid(rate * x)
