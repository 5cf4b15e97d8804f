"""What a memory is trained for: write a history, then answer from the state alone.

δ-mem (arXiv 2605.12357, and its released code): a write pass over the history with gradients
through the state, then a read pass of the question and its answer at fresh positions, without the
history's keys and values and without writes; cross-entropy of the answer's tokens, and a pull of
the write gates towards a target. Beside it, if asked for, the same with the history in view: one
pass over it and some questions with their answers, in which the memory reads and writes as it goes.

A model without a memory (LoRA) has the same loss and no write pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax import memory
from kvjax.models.decoder import Decoder, forward_beside, init_beside
from kvjax.soft.layout import IGNORE
from kvjax.train import Losses
from kvjax.train.losses import next_token_loss
from kvjax.train.step import Loss

PASSES = ("read", "write")
Ints = Any  # int32: NumPy's where a batch is made, JAX's where it is used


class Batch(NamedTuple):
    """B episodes with Q questions each; everything int32, rows left-aligned.

    Attributes:
      history: [B,W], the messages.
      messages: [B,W], the message that a token belongs to, −1 behind the last one.
      asked: [B,Q,T], question and answer with the end of its line.
      length: [B,Q], tokens of these.
      at: [B,Q,A], places whose next token is the answer's.
      wanted: [B,Q,A], those tokens, −100 behind the last one.
    """

    history: Ints
    messages: Ints
    asked: Ints
    length: Ints
    at: Ints
    wanted: Ints


@dataclass(frozen=True)
class Objective:
    """Weights of the loss.

    Attributes:
      context: share of the loss with the history in view; 0: the original's loss.
      seen: questions at most that are asked with it in view, one behind the other, so that one pass
        over the history serves them all.
      gates: the pass whose gates are pulled: "read", as the original's code does, or "write".
      weight, target: of weight · mean over layers of (mean gate − target)².
      recompute: activation checkpointing.

    Raises:
      ValueError: naming the field.
    """

    context: float = 0.0
    seen: int = 1
    gates: str = "read"
    weight: float = 0.01
    target: float = 0.05
    recompute: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.context <= 1:
            raise ValueError(f"training.context={self.context}: use 0 to 1")
        if self.seen < 1:
            raise ValueError(f"training.seen={self.seen}: use 1 or more")
        if self.gates not in PASSES:
            raise ValueError(f"training.gates={self.gates!r}: use one of {PASSES}")
        if self.gates == "read" and self.context == 1:
            raise ValueError("training.gates='read': with context=1 there is no read pass; use "
                             "'write', or a smaller context")  # fmt: skip
        if self.weight < 0:
            raise ValueError(f"training.weight={self.weight}: use 0 or more")


class View(NamedTuple):
    """Mean loss of the answers' tokens, and the mean gate of each layer (None: not recorded)."""

    loss: Array
    gates: Array | None


def loss(how: Objective) -> Loss:
    """The loss of a model, with or without a memory, and a `Batch`, as `kvjax.train` takes it."""

    def of(model: Decoder, batch: Batch) -> Losses:
        views = []
        if how.context < 1:
            views.append((1 - how.context, from_state(model, batch, how)))
        if how.context > 0:
            views.append((how.context, in_view(model, batch, how)))
        mean = sum((share * view.loss for share, view in views), jnp.float32(0))
        recorded = [view.gates for _, view in views if view.gates is not None]
        if recorded:
            mean += how.weight * jnp.mean((jnp.stack(recorded) - how.target) ** 2)
        count = (batch.wanted != IGNORE).sum()
        return Losses(count * mean, count, {})

    return of


def from_state(model: Decoder, batch: Batch, how: Objective) -> View:
    """Write pass, then read pass: the history is there as a state alone."""
    rows, questions, width = batch.asked.shape
    states, gates = init_beside(model, rows), None
    record = _has_memory(model)
    if record:
        _, states = forward_beside(
            model, batch.history, memory.writing(states, True, how.gates == "write"),
            batch.messages >= 0, batch.messages, how.recompute,
        )  # fmt: skip
        gates = memory.gate_means(states) if how.gates == "write" else None
    states = jax.tree.map(lambda x: jnp.repeat(x, questions, 0), states)
    tokens, length = batch.asked.reshape(-1, width), batch.length.reshape(-1, 1)
    hidden, after = forward_beside(
        model, tokens, memory.writing(states, False, how.gates == "read"),
        jnp.arange(width) < length, None, how.recompute,
    )  # fmt: skip
    if record and how.gates == "read":
        gates = memory.gate_means(after)
    answers = (leaf.reshape(rows * questions, -1) for leaf in (batch.at, batch.wanted))
    return View(_answer_loss(model, hidden, *answers), gates)


def in_view(model: Decoder, batch: Batch, how: Objective) -> View:
    """One pass over the history and its first `how.seen` questions with their answers.

    A memory that writes messages reads nothing that the same pass writes: this teaches it nothing.
    """
    rows, count = len(batch.history), min(how.seen, batch.asked.shape[1])
    ends = question_ends(batch, count)
    tokens, messages = joined(batch, ends)
    record = _has_memory(model) and how.gates == "write"
    states = memory.writing(init_beside(model, rows), True, record)
    real = jnp.arange(tokens.shape[1]) < ends[:, -1:]
    hidden, after = forward_beside(model, tokens, states, real, messages, how.recompute)
    starts = (ends - batch.length[:, :count])[..., None]
    at, wanted = starts + batch.at[:, :count], batch.wanted[:, :count]
    lost = _answer_loss(model, hidden, at.reshape(rows, -1), wanted.reshape(rows, -1))
    return View(lost, memory.gate_means(after) if record else None)


def question_ends(batch: Batch, count: int) -> Array:
    """Where each of the first `count` questions ends in a `joined` row, [B,count]."""
    history = (batch.messages >= 0).sum(1, keepdims=True)
    return history + jnp.cumsum(batch.length[:, :count], 1)


def joined(batch: Batch, ends: Array) -> tuple[Array, Array]:
    """A history and the first n questions with their answers, which end at `ends` [B,n], in one row
    [B,W+n·T], left-aligned, and its messages, −1 behind the history."""
    count, width = ends.shape[1], batch.asked.shape[2]
    pad = ((0, 0), (0, count * width))
    place = jnp.arange(batch.history.shape[1] + pad[1][1])
    which = (place[:, None] >= ends[:, None, :-1]).sum(-1)  # the question that a place is in
    starts = jnp.take_along_axis(ends - batch.length[:, :count], which, 1)
    inside = jnp.clip(place - starts, 0, width - 1)
    asked = jnp.take_along_axis(batch.asked.reshape(len(which), -1), which * width + inside, 1)
    messages = jnp.pad(batch.messages, pad, constant_values=-1)
    return jnp.where(messages >= 0, jnp.pad(batch.history, pad), asked), messages


def _has_memory(model: Decoder) -> bool:
    return any(block.beside is not None for block in model.layers)


def _answer_loss(model: Decoder, hidden: Array, at: Array, wanted: Array) -> Array:
    """Logits are made at the answers' places alone."""
    picked = jnp.take_along_axis(hidden, at[..., None], 1)
    total, count = next_token_loss(model, picked, wanted, wanted.shape[1])
    return total / jnp.maximum(count, 1)
