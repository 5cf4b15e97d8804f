"""Compress once, ask often: documents as soft tokens that are kept, saved and prefilled.

context = encode_context(model, [encoder_tokenizer.encode(text)])
inputs = prompt(model, [context[0], tokenizer.encode("Question: ...")])
out = kvjax.generate(model.decoder, inputs, transform)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from kvjax.io.files import FileError
from kvjax.io.shards import read_file
from kvjax.models.decoder import embed
from kvjax.soft.adapter import TEXT
from kvjax.soft.encoder import encode
from kvjax.soft.files import save_arrays
from kvjax.soft.layout import Windows, join_windows, slots, windows
from kvjax.soft.model import LCLM

WINDOWS_PER_PASS = 128  # what the encoder's activations take does not grow with the document


@dataclass(frozen=True)
class Context:
    """Compressed documents: for each its soft tokens [M,E] in the decoder's dtype."""

    documents: tuple[Array, ...]

    def __getitem__(self, index: int) -> Array:
        return self.documents[index]

    def __len__(self) -> int:
        return len(self.documents)

    def save(self, path: Path | str) -> None:
        """Writes one safetensors file; document i is the tensor named i."""
        save_arrays(Path(path), {str(i): x for i, x in enumerate(self.documents)})

    @classmethod
    def load(cls, path: Path | str) -> Context:
        """A context that `save` wrote, bit for bit. FileError where the file is damaged."""
        stored = read_file(Path(path))
        if set(stored) != {str(i) for i in range(len(stored))}:
            raise FileError(path, "is no saved context")
        return cls(tuple(jnp.array(stored[str(i)].read()) for i in range(len(stored))))


def encode_context(
    model: LCLM,
    documents: Sequence[Sequence[int]],
    ratio: int | None = None,
    windows_per_pass: int = WINDOWS_PER_PASS,
) -> Context:
    """Compresses documents, each a memory region of its own.

    Args:
      model: the compressor.
      documents: encoder ids; their windows share passes, whichever document they are of.
      ratio: N; None: the model's first.
      windows_per_pass: encoder windows at a time. Every pass has this shape and runs the same
        program; beyond it only the soft tokens themselves take memory.

    Raises:
      ValueError: for a ratio that the model does not serve, or fewer than one window.
    """
    config = model.config
    if windows_per_pass < 1:
        raise ValueError(f"windows_per_pass is {windows_per_pass}; use 1 or more")
    cut = [windows(ids, config, ratio) for ids in documents]
    needed, before = [], 0
    for ids, own in zip(documents, cut, strict=True):
        needed.append(slots(len(ids), config, ratio) + before * config.slots)
        before += len(own.length)
    whole = join_windows(cut, config, -(-before // windows_per_pass) * windows_per_pass)
    latents = _passes(model, whole, np.concatenate([*needed, np.zeros(0, np.int32)]),
                      windows_per_pass)  # fmt: skip
    ends = np.cumsum([len(index) for index in needed])
    parts = [latents[end - len(index) : end] for index, end in zip(needed, ends, strict=True)]
    if model.adapter.kind != "mlp":  # its attention reads a whole document
        parts = [_adapt(model, part) if before else part for part in parts]
    return Context(tuple(parts))


def _passes(model: LCLM, whole: Windows, needed: np.ndarray, most: int) -> Array:
    """The latents, or with an MLP adapter already the soft tokens, of the slots `needed`."""
    graph, state = nnx.split(model)
    size, found = most * model.config.slots, []
    for at in range(0, len(whole.length), most):
        piece = Windows(*(leaf[at : at + most] for leaf in whole))
        rows = _pass(graph, state, piece)
        first = at * model.config.slots
        here = needed[(needed >= first) & (needed < first + size)] - first
        found.append(rows.reshape(size, -1)[here])
    if not found:
        return jnp.zeros((0, model.decoder.config.hidden_size), jnp.dtype(model.decoder.dtype))
    return found[0] if len(found) == 1 else jnp.concatenate(found)


@functools.partial(jax.jit, static_argnums=0)
def _pass(graph: nnx.GraphDef, state: nnx.State, windows: Windows) -> Array:
    model = nnx.merge(graph, state)
    z = encode(model.encoder, windows, model.config)
    if model.adapter.kind != "mlp":
        return z
    soft = model.adapter(z, jnp.full(z.shape[:2], TEXT))
    return soft.astype(jnp.dtype(model.decoder.dtype))


def _adapt(model: LCLM, latents: Array) -> Array:
    """Soft tokens of one whole document, padded to whole windows: lengths share programs."""
    count, slots = len(latents), model.config.slots
    padded = jnp.pad(latents, ((0, max(-(-count // slots), 1) * slots - count), (0, 0)))
    region = jnp.where(jnp.arange(len(padded)) < count, 0, TEXT)
    graph, state = nnx.split(model.adapter)
    soft = _adapted(graph, state, padded[None], region[None])[0, :count]
    return soft.astype(jnp.dtype(model.decoder.dtype))


@functools.partial(jax.jit, static_argnums=0)
def _adapted(graph: nnx.GraphDef, state: nnx.State, latents: Array, region: Array) -> Array:
    return nnx.merge(graph, state)(latents, region)


def prompt(model: LCLM, parts: Sequence[Sequence[int] | Array]) -> Array:
    """Decoder inputs [1,T,E] of raw text and compressed documents in any order.

    `kvjax.step`, `kvjax.prefill` and `kvjax.generate` take them in place of tokens.

    Args:
      model: the compressor.
      parts: decoder ids, or soft tokens [M,E] of a `Context`, which get their markers.

    Raises:
      ValueError: for no part at all, ids outside the vocabulary, or soft tokens of another width.
    """
    config, width = model.config, model.decoder.config.hidden_size
    ids: list[int] = []
    places: list[int] = []
    soft: list[Array] = []
    for part in parts:
        if np.ndim(part) < 2:
            ids += [int(i) for i in part]
            continue
        rows = jnp.asarray(part)
        if rows.shape[1] != width:
            raise ValueError(f"soft tokens {rows.shape} for a decoder of width {width}; "
                             "use a context of this model")  # fmt: skip
        places += range(len(ids) + 1, len(ids) + 1 + len(rows))
        ids += [config.memory_start, *[config.memory] * len(rows), config.memory_end]
        soft.append(rows)
    if not ids or min(ids) < 0 or max(ids) >= model.decoder.config.vocab_size:
        raise ValueError("parts: give at least one token, each within the decoder's vocabulary")
    embedded = embed(model.decoder, jnp.asarray([ids], jnp.int32))
    if not places:
        return embedded
    return embedded.at[0, np.array(places)].set(jnp.concatenate(soft).astype(embedded.dtype))
