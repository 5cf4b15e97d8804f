"""Many encoder states become few latents: the mean of a block, its concatenation, or an EOS."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from kvjax.soft.config import SoftConfig
from kvjax.soft.layout import Windows


def pool(hidden: Array, windows: Windows, config: SoftConfig) -> Array:
    """Pools each window's own tokens, N by N.

    Args:
      hidden: [R,width,D], the encoder's last states.
      windows: the windows that they belong to.
      config: which pooling.

    Returns:
      [R,M,D], or [R,M,N·D] for concat, in hidden's dtype. Slots beyond a window's ⌈own / N⌉ hold
      no meaning.
    """
    if config.pooling == "mean":
        return _mean(hidden, windows, config.slots)
    if config.pooling == "concat":
        return _concat(hidden, windows, config)
    return _eos(hidden, windows, config.slots)


def _mean(hidden: Array, windows: Windows, slots: int) -> Array:
    """The last block's mean is over the tokens that it has. N may differ from window to window,
    so blocks are a 0/1 product rather than a reshape: thousandths of the encoder's own cost."""
    index = jnp.arange(hidden.shape[1]) - windows.first[:, None]
    inside = (index >= 0) & (index < windows.own[:, None])
    block = jnp.where(inside, index // windows.ratio[:, None], -1)
    member = block[..., None] == jnp.arange(slots)  # [R,width,M]
    total = jnp.einsum(
        "rwm,rwd->rmd", member.astype(hidden.dtype), hidden,
        precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip
    return (total / jnp.maximum(member.sum(1), 1)[..., None]).astype(hidden.dtype)


def _concat(hidden: Array, windows: Windows, config: SoftConfig) -> Array:
    """A block's states side by side, token by token; zeros where the last block has none."""
    index = jnp.arange(config.window)
    own = _take(hidden, windows.first[:, None] + index)
    own = jnp.where((index < windows.own[:, None])[..., None], own, 0)
    return own.reshape(own.shape[0], config.slots, config.latent_size(hidden.shape[2]))


def _eos(hidden: Array, windows: Windows, slots: int) -> Array:
    """The states of the ids that were appended behind the window, one a block."""
    appended = -(-windows.own // windows.ratio)
    return _take(hidden, (windows.length - appended)[:, None] + jnp.arange(slots))


def _take(hidden: Array, index: Array) -> Array:
    index = jnp.clip(index, 0, hidden.shape[1] - 1)
    return jnp.take_along_axis(hidden, index[..., None], 1)
