"""A stage of training: which weights, at which learning rates, for how many steps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp
import optax
from jax import Array


@dataclass(frozen=True)
class Part:
    """Weights that are trained alike.

    Attributes:
      name: what it is called.
      pattern: a regular expression that their names begin with.
      learning_rate: the peak.
      weight_decay: of matrices; vectors (norms, biases) never decay.
      rows: of each matrix, the only rows that are trained; none: all.
      when: what a batch must have for these weights to move (a key of `Losses.seen`); "": always.
        Where it lacks that, neither they nor their optimizer's state change.
    """

    name: str
    pattern: str
    learning_rate: float
    weight_decay: float = 0.0
    rows: tuple[int, ...] = ()
    when: str = ""

    def __post_init__(self) -> None:
        if self.learning_rate <= 0 or self.weight_decay < 0:
            raise ValueError(
                f"part {self.name}: learning_rate {self.learning_rate} must be above 0, "
                f"weight_decay {self.weight_decay} 0 or more"
            )


@dataclass(frozen=True)
class Stage:
    """Steps of AdamW on some parts; every other weight stays as it is.

    Attributes:
      name: what it is called.
      steps: how many.
      parts: what is trained.
      warmup: steps of linear warm-up, then a cosine.
      final_learning_rate: where the cosine ends (a part with a lower peak stays at its peak).
      clip: the largest global gradient norm.
      betas, eps: AdamW's.
    """

    name: str
    steps: int
    parts: tuple[Part, ...]
    warmup: int = 0
    final_learning_rate: float = 1e-6
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"stage {self.name}: {self.steps} steps of which {self.warmup} warm up; use 1 "
                "step or more, and fewer for the warm-up"
            )
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"stage {self.name}: parts {names}; give at least one, each once")


def members(stage: Stage, names: Iterable[str]) -> dict[str, list[str]]:
    """The names of each part's weights.

    Raises:
      ValueError: where a part has none, or two have the same.
    """
    names = list(names)
    found = {p.name: [n for n in names if re.match(p.pattern, n)] for p in stage.parts}
    taken: set[str] = set()
    for part, own in found.items():
        if not own:
            raise ValueError(f"stage {stage.name}, part {part}: its pattern matches no weight")
        if both := sorted(taken & set(own)):
            raise ValueError(f"stage {stage.name}: {both[0]} is in two parts; give it to one")
        taken |= set(own)
    return found


def learning_rate(stage: Stage, part: Part, step: Array | int) -> Array:
    """The learning rate of a part at a step of its stage, counted from 0."""
    peak = part.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        peak / max(stage.warmup, 1), peak, stage.warmup, stage.steps,
        min(stage.final_learning_rate, peak),
    )  # fmt: skip
    return jnp.asarray(schedule(step), jnp.float32)


def optimizer(stage: Stage, part: Part) -> optax.GradientTransformation:
    """AdamW without its learning rate, which follows the stage's step rather than Adam's count."""
    return optax.chain(
        optax.scale_by_adam(*stage.betas, eps=stage.eps),
        optax.add_decayed_weights(part.weight_decay, lambda ws: {n: ws[n].ndim > 1 for n in ws}),
    )
