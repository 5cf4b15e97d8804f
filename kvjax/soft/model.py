"""LCLM: an encoder, an adapter and a decoder; logits and loss of packed batches.

The decoder is an ordinary one: it sees soft tokens as inputs in place of embedded tokens, so
every cache transform works on its already shorter cache.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder, embed, forward_hidden, unembed
from kvjax.soft.adapter import TEXT, Adapter, initial_adapter
from kvjax.soft.config import SoftConfig
from kvjax.soft.encoder import encode_in_passes
from kvjax.soft.layout import IGNORE, Batch


class Inputs(NamedTuple):
    """What the decoder is fed.

    Attributes:
      latents: z [B,T,Dz] at memory positions (elsewhere without meaning).
      soft: s [B,T,E] at memory positions (elsewhere without meaning).
      embeddings: [B,T,E], text embeddings with the soft tokens in their places.
    """

    latents: Array
    soft: Array
    embeddings: Array


class LCLM(nnx.Module):
    """The latent-context model of arXiv 2606.09659.

    Args:
      encoder: a stack without a head (`Decoder` with tied embeddings).
      adapter: from the encoder's latents to the decoder's embeddings.
      decoder: the language model.
      config: windows, ratios, pooling, markers.

    Raises:
      ValueError: for markers beyond the decoder's vocabulary, or an encoder with attention
        windows that is to see both ways.
    """

    def __init__(
        self, encoder: Decoder, adapter: Adapter, decoder: Decoder, config: SoftConfig
    ) -> None:
        top = max(config.memory_start, config.memory, config.memory_end)
        if top >= decoder.config.vocab_size:
            raise ValueError(
                f"soft: marker {top} is beyond the decoder's vocabulary of "
                f"{decoder.config.vocab_size}; add rows with add_memory_rows"
            )
        if not config.causal and any(layer.window for layer in encoder.config.layers):
            raise ValueError("soft.causal is False but the encoder has attention windows")
        self.encoder, self.adapter, self.decoder, self.config = encoder, adapter, decoder, config


def new_model(encoder: Decoder, decoder: Decoder, config: SoftConfig, seed: int = 0) -> LCLM:
    """A model to train, from two trained stacks and a fresh adapter in the decoder's dtype."""
    start = initial_adapter(config, encoder.config, decoder.config, seed)
    adapter = Adapter(config, encoder.config, decoder.config, start, decoder.dtype)
    return LCLM(encoder, adapter, decoder, config)


def add_memory_rows(model: Decoder, seed: int = 0) -> tuple[Decoder, tuple[int, int, int]]:
    """The decoder with three more vocabulary rows, and their ids (start, memory, end).

    New rows are drawn like the old ones: normal with each channel's own mean and deviation.
    """
    tensors, vocab = model.tensors(), model.config.vocab_size
    draw = np.random.default_rng(seed)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            old = tensors[name].astype(np.float32)
            new = draw.normal(old.mean(0), old.std(0), (3, old.shape[1]))
            tensors[name] = np.concatenate([tensors[name], new.astype(tensors[name].dtype)])
    config: DecoderConfig = dataclasses.replace(model.config, vocab_size=vocab + 3)
    return Decoder(config, tensors, model.dtype), (vocab, vocab + 1, vocab + 2)


# ---- one batch, traceable and differentiable -------------------------------------------------


def inputs(
    model: LCLM, batch: Batch, checkpoint: bool = False, windows_per_pass: int | None = None
) -> Inputs:
    """Encodes a batch's windows and lays the soft tokens among the text.

    Args:
      model: the model.
      batch: from `layout.collate`.
      checkpoint: recompute each encoder layer in the backward pass.
      windows_per_pass: at most so many windows in the encoder at once; None: all.
    """
    config, memory = model.config, batch.slot >= 0
    most = windows_per_pass or max(len(batch.windows.length), 1)
    embedded = embed(model.decoder, batch.tokens)
    if len(batch.windows.length) == 0:  # a shape without windows: nothing to encode
        size = config.latent_size(model.encoder.config.hidden_size)
        z = jnp.zeros((*batch.tokens.shape, size), embedded.dtype)
    else:
        z = encode_in_passes(model.encoder, batch.windows, config, most, checkpoint)
        z = z.reshape(-1, z.shape[-1])[jnp.maximum(batch.slot, 0)]
    begun = jnp.cumsum(batch.tokens == config.memory_start, 1)
    soft = model.adapter(z, jnp.where(memory, begun, TEXT))
    placed = jnp.where(memory[..., None], soft.astype(embedded.dtype), embedded)
    return Inputs(z, soft, placed)


def hidden(
    model: LCLM, batch: Batch, checkpoint: bool = False, windows_per_pass: int | None = None
) -> Array:
    """The decoder's states [B,T,E] after its last norm; documents of a row do not see each other.

    `unembed(model.decoder, hidden)` makes logits of them, whole or chunk by chunk.
    """
    fed = inputs(model, batch, checkpoint, windows_per_pass).embeddings
    return forward_hidden(
        model.decoder, fed, checkpoint=checkpoint, segments=jnp.asarray(batch.segments)
    )


def logits(
    model: LCLM, batch: Batch, checkpoint: bool = False, windows_per_pass: int | None = None
) -> Array:
    """[B,T,V] float32; at padding without meaning."""
    return unembed(model.decoder, hidden(model, batch, checkpoint, windows_per_pass))


def targets(batch: Batch) -> Array:
    """What each position is to predict, [B,T] int32: the next token's label, −100 at a row's end
    and where the next token is another document's (the original trains across that border)."""
    labels, segments = jnp.asarray(batch.labels), jnp.asarray(batch.segments)
    following = jnp.where(segments[:, 1:] == segments[:, :-1], labels[:, 1:], IGNORE)
    return jnp.pad(following, ((0, 0), (0, 1)), constant_values=IGNORE)


def cross_entropy(scores: Array, wanted: Array) -> tuple[Array, Array]:
    """Σ −log p(wanted) in float32 over positions that count, and how many count.

    scores [B,T,V] float32; wanted [B,T] int32, −100 where a position does not count.
    """
    counts = wanted != IGNORE
    chosen = jnp.take_along_axis(scores, jnp.maximum(wanted, 0)[..., None], -1)[..., 0]
    lost = jax.nn.logsumexp(scores, -1) - chosen
    return jnp.where(counts, lost, 0).sum(), counts.sum()


def loss(
    model: LCLM, batch: Batch, checkpoint: bool = False, windows_per_pass: int | None = None
) -> Array:
    """Mean next-token cross-entropy over the positions that count, float32; 0 if none does."""
    scores = logits(model, batch, checkpoint, windows_per_pass)
    total, count = cross_entropy(scores, targets(batch))
    return total / jnp.maximum(count, 1)
