"""The encoder: a decoder stack without its head, run over windows of a few hundred tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.models.decoder import Decoder, forward_hidden
from kvjax.soft.config import SoftConfig
from kvjax.soft.layout import Windows
from kvjax.soft.pooling import pool


def encode(
    encoder: Decoder, windows: Windows, config: SoftConfig, checkpoint: bool = False
) -> Array:
    """Latents of each window: the states after the last norm, pooled.

    Args:
      encoder: a Qwen3-Embedding-shaped stack; its head, if it has one, is not used.
      windows: R windows; each is a row of its own whose positions begin at 0.
      config: mask, pooling and ratios.
      checkpoint: recompute each layer in the backward pass.

    Returns:
      z [R,M,Dz] in the encoder's dtype.
    """
    real = jnp.arange(windows.tokens.shape[1]) < windows.length[:, None]
    hidden = forward_hidden(encoder, windows.tokens, real, checkpoint, causal=config.causal)
    return pool(hidden, windows, config)


def encode_in_passes(
    encoder: Decoder, windows: Windows, config: SoftConfig, most: int, checkpoint: bool = False
) -> Array:
    """As `encode`, at most `most` windows at a time, so that activations take constant memory."""
    count = len(windows.length)
    if count <= most:
        return encode(encoder, windows, config, checkpoint)
    passes = -(-count // most)

    # Pass p takes windows p, p + passes, …: where windows are split over devices, each pass then
    # has work for all of them, and no window moves.
    def spread(leaf: Array) -> Array:
        fill = [(0, passes * most - count)] + [(0, 0)] * (leaf.ndim - 1)
        full = jnp.pad(leaf, fill, mode="edge")
        return full.reshape(most, passes, *leaf.shape[1:]).swapaxes(0, 1)

    def one(_: None, some: Windows) -> tuple[None, Array]:
        return None, encode(encoder, some, config, checkpoint)

    # Checkpointed as a whole too: else every pass keeps its layers' inputs for the backward pass.
    body = jax.checkpoint(one) if checkpoint else one
    z = jax.lax.scan(body, None, jax.tree.map(spread, jax.tree.map(jnp.asarray, windows)))[1]
    return z.swapaxes(0, 1).reshape(passes * most, *z.shape[2:])[:count]


def first_layers(model: Decoder, count: int) -> Decoder:
    """The first layers of a decoder with its last norm: an encoder to start from.

    Raises:
      ValueError: for fewer than one layer, or more than there are.
    """
    if not 1 <= count <= len(model.config.layers):
        raise ValueError(f"count is {count}; the model has {len(model.config.layers)} layers")
    config = dataclasses.replace(
        model.config, layers=model.config.layers[:count], tie_embeddings=True
    )
    return Decoder(config, model.tensors(), model.dtype)
