"""A model of three matrices that compiles in a moment: what a loop does needs no transformer."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.train import Losses, Part, Stage, first_state, make_step, take_apart


class Matrix(nnx.Module):
    def __init__(self, seed: int, inputs: int, outputs: int) -> None:
        draw = np.random.default_rng(seed)
        self.kernel = nnx.Param(jnp.asarray(draw.normal(0, 0.5, (inputs, outputs)), jnp.float32))


class Toy(nnx.Module):
    """y = (x·embed + has · tanh(x·encoder)·adapter): only a batch with memory uses the latter."""

    def __init__(self, dtype: str = "float32") -> None:
        self.encoder, self.adapter, self.embed = Matrix(0, 6, 4), Matrix(1, 4, 5), Matrix(2, 6, 5)
        self.dtype = dtype

    def __call__(self, x, has):
        x = x.astype(self.dtype)
        soft = jnp.tanh(x @ self.encoder.kernel[...]) @ self.adapter.kernel[...]
        return x @ self.embed.kernel[...] + jnp.where(has, soft, 0)


class Batch(NamedTuple):
    x: np.ndarray  # [micro,B,6]
    y: np.ndarray  # [micro,B,5]
    has: np.ndarray  # [micro,B,1]


def loss(model: Toy, batch: Batch) -> Losses:
    off = model(batch.x, batch.has).astype(jnp.float32) - batch.y
    return Losses((off**2).sum(), jnp.int32(off.size), {"memory": batch.has.any()})


def batch(seed: int, memory: bool = True, micro: int = 1) -> Batch:
    draw = np.random.default_rng(seed)
    x, y = draw.normal(size=(micro, 3, 6)), draw.normal(size=(micro, 3, 5))
    return Batch(x.astype("float32"), y.astype("float32"), np.full((micro, 3, 1), memory))


def stage(steps: int = 12, embed: bool = True, name: str = "all") -> Stage:
    parts = [
        Part("adapter", r"adapter\.", 1e-2, 0.1, when="memory"),
        Part("encoder", r"encoder\.", 1e-2, 0.1, when="memory"),
    ]
    if embed:
        parts.append(Part("embed", r"embed\.", 1e-2))
    return Stage(name, steps, tuple(parts), warmup=2)


def params():
    """Copies: what is donated must not be the model's own."""
    return jax.tree.map(jnp.copy, take_apart(Toy())[1])


@functools.cache
def compiled(plan: Stage, dtype: str = "float32"):
    """The step of a plan; tests with the same plan share its program."""
    return make_step(take_apart(Toy(), dtype)[0], plan, loss, dtype)


def started(plan: Stage):
    return first_state(params(), plan)


class Counted:
    """Batches by number; every third has no memory."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> Batch:
        self.at += 1
        return batch(self.at, memory=self.at % 3 != 0)

    def get_state(self) -> dict:
        return {"at": self.at}

    def set_state(self, state: dict) -> None:
        self.at = state["at"]
