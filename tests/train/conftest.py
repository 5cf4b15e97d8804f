"""A compressor of a few thousand weights, and batches for it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.config import DecoderConfig, LayerConfig, tensor_shapes
from kvjax.models.decoder import Decoder
from kvjax.soft import LCLM, Batch, Shape, SoftConfig, collate, hidden, lay_out, new_model, targets
from kvjax.soft.layout import Region, Text
from kvjax.train import (
    Losses,
    Part,
    Stage,
    TrainState,
    first_state,
    make_step,
    put_together,
    take_apart,
)
from kvjax.train.losses import next_token_loss

SOFT = SoftConfig(29, 30, 31, ratios=(2, 4), window=8)
SHAPE = Shape(rows=2, length=24, windows=4)


@functools.cache
def stack(layers: int, seed: int = 0) -> Decoder:
    config = DecoderConfig(
        family="qwen3", vocab_size=32, hidden_size=16, intermediate_size=24, num_heads=2,
        num_kv_heads=1, head_dim=8, layers=(LayerConfig(),) * layers, context=256, qk_norm=True,
        tie_embeddings=True,
    )  # fmt: skip
    draw = np.random.default_rng(seed)
    tensors = {
        name: (draw.normal(0, 0.2, shape) if len(shape) > 1 else np.ones(shape)).astype("float32")
        for name, shape in tensor_shapes(config).items()
    }
    return Decoder(config, tensors)


@functools.cache
def model() -> LCLM:
    return new_model(stack(1, 1), stack(2), SOFT)


def loss(model: LCLM, batch: Batch) -> Losses:
    total, count = next_token_loss(model.decoder, hidden(model, batch), targets(batch), 7)
    return Losses(total, count, {"memory": (batch.slot >= 0).any()})


@jax.jit
def _plain(params: dict, one: Batch) -> Losses:
    return loss(put_together(take_apart(model())[0], params), one)


def plain(params: dict, one: Batch) -> Losses:
    """The losses of one micro-batch, compiled once."""
    return _plain({name: params[name] for name in take_apart(model())[1]}, one)


@functools.cache
def compiled(plan: Stage, dtype: str = "float32"):
    """The step of a plan; tests with the same plan share its program."""
    return make_step(take_apart(model(), dtype)[0], plan, loss, dtype)


def started(plan: Stage) -> TrainState:
    """A state whose weights are copies: the model must outlive the donation."""
    return first_state(jax.tree.map(jnp.copy, take_apart(model())[1]), plan)


def batch(seed: int, regions: bool = True, micro: int = 1) -> Batch:
    """Stacked micro-batches of random documents."""
    draw = np.random.default_rng(seed)

    def document() -> list[Text | Region]:
        words = draw.integers(0, 29, 20)
        middle = Region(words[6:13], 4) if regions else Text(words[6:13])
        return [Text(words[:6]), middle, Text(words[13:])]

    def one() -> Batch:
        rows = [[lay_out(document(), SOFT)] for _ in range(SHAPE.rows)]
        return collate(rows, SOFT, SHAPE)

    return jax.tree.map(lambda *leaves: np.stack(leaves), *[one() for _ in range(micro)])


def stage(steps: int = 12, decoder: bool = True, **changes) -> Stage:
    parts = [
        Part("adapter", r"adapter\.", 1e-2, 0.1, when="memory"),
        Part("encoder", r"encoder\.", 1e-3, 0.1, when="memory"),
    ]
    if decoder:
        parts.append(Part("decoder", r"decoder\.", 1e-3))
    return Stage("all", steps, tuple(parts), warmup=2, **changes)


class Counted:
    """Batches by number; every third has no region."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> Batch:
        self.at += 1
        return batch(self.at, regions=self.at % 3 != 0)

    def get_state(self) -> dict:
        return {"at": self.at}

    def set_state(self, state: dict) -> None:
        self.at = state["at"]
