"""The four stages (and the pre-training of a decoder made here) as the config has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from experiments.lclm.examples import Maker
from kvjax.data.packing import Packed, examples
from kvjax.models.decoder import Decoder, forward_hidden
from kvjax.models.sharding import decoder_shardings
from kvjax.soft import LCLM, Batch, Shape, SoftConfig, hidden, targets
from kvjax.train import Fitted, Losses, Part, Stage, fit
from kvjax.train.loop import Batches, Devices
from kvjax.train.losses import next_token_loss
from kvjax.train.sharding import make_mesh
from kvjax.train.state import Frame, Params, flat
from kvjax.train.step import Loss

STAGES = ("adapter", "encoder", "end_to_end", "sft")
LORA = r"decoder\..*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
MEMORY = "memory"  # what a batch must have for the encoder and the adapter to move


def stage(config: ConfigDict, name: str, soft: SoftConfig | None) -> Stage:
    """A stage of the config; `soft` None: the pre-training, of a decoder alone."""
    own, decay = config.stages[name], config.decay
    parts: list[Part] = []
    for part, rate in own.rates.items():
        if part == "decoder" and soft is None:
            parts.append(Part("decoder", "", rate, decay.pretrain))
        elif part == "decoder" and config.model.decoder != "frozen":
            pattern = r"decoder\..*\.lora_" if config.model.decoder == "lora" else r"decoder\."
            parts.append(Part("decoder", pattern, rate, decay.decoder))
        elif part != "decoder":
            parts.append(Part(part, rf"{part}\.", rate, decay[part], when=MEMORY))
    if soft is not None and name == "adapter":  # the markers' embeddings come to life here
        rows = (soft.memory_start, soft.memory, soft.memory_end)
        rate = own.rates.adapter
        parts.append(Part("rows", r"decoder\.embed_tokens\.weight", rate, rows=rows, when=MEMORY))
    return Stage(name, own.steps, tuple(parts), own.warmup, config.final_learning_rate, config.clip)


def loss(chunk: int, recompute: bool = True, windows_per_pass: int | None = None) -> Loss:
    """Next-token loss outside regions, `chunk` positions of each row at a time; `recompute`:
    activation checkpointing."""

    def of(model: LCLM, batch: Batch) -> Losses:
        states = hidden(model, batch, recompute, windows_per_pass)
        total, count = next_token_loss(model.decoder, states, targets(batch), chunk)
        return Losses(total, count, {MEMORY: (batch.slot >= 0).any()})

    return of


def _decoder_loss(chunk: int, recompute: bool) -> Loss:
    def of(model: Decoder, batch: Batch) -> Losses:
        states = forward_hidden(model, batch.tokens, checkpoint=recompute, segments=batch.segments)
        total, count = next_token_loss(model, states, targets(batch), chunk)
        return Losses(total, count, {})

    return of


def pretrain(
    config: ConfigDict, frame: Frame, params: Params, maker: Maker, train: list, folder: Path
) -> Fitted:
    """A decoder on raw text."""
    plan = stage(config, "pretrain", None)
    shape = Shape(config.shape.rows, config.shape.length, 0)
    make = maker.mixture(config.data.mixtures.pretrain, (maker.config.ratios[0],), True)

    def data(_: int) -> Batches:
        return iter(Packed(examples(train, make, config.seed), maker.config, shape,
                           config.shape.micro))  # fmt: skip

    objective = _decoder_loss(config.shape.chunk, config.shape.recompute)
    return fit(frame, params, [plan], objective, data, folder, dtype=config.dtype,
               save_every=config.save_every)  # fmt: skip


def batches(config: ConfigDict, maker: Maker, train: list, name: str, seed: int) -> Batches:
    """The stream of a stage: `sft` has a mixture of its own, the others share one."""
    mixture = config.data.mixtures["sft" if name == "sft" else "continual"]
    make = maker.mixture(mixture, tuple(config.ratios), config.reconstruction)
    shape = Shape(config.shape.rows, config.shape.length, config.shape.windows)
    return iter(Packed(examples(train, make, seed), maker.config, shape, config.shape.micro))


def train(
    config: ConfigDict, frame: Frame, params: Params, maker: Maker, pieces: list, folder: Path,
    devices: Devices | None,
) -> Fitted:  # fmt: skip
    """All four stages."""
    plans = [stage(config, name, maker.config) for name in STAGES]

    # A seed of its own for each stage: none reads again what the one before has read first.
    def data(index: int) -> Batches:
        return batches(config, maker, pieces, STAGES[index], config.seed + 1 + index)

    shape = config.shape
    objective = loss(shape.chunk, shape.recompute, shape.windows_per_pass or None)
    return fit(frame, params, plans, objective, data, folder, dtype=config.dtype,
               save_every=config.save_every, devices=devices)  # fmt: skip


def devices_for(
    config: ConfigDict, model: LCLM, devices: Sequence[Any] | None = None
) -> Devices | None:
    """The mesh of the config, None for one device; both stacks are split by head over "model".

    `devices`: those to lay it over; None: the ones that are here.
    """
    sizes = dict(config.mesh)
    if all(size == 1 for size in sizes.values()):
        return None
    mesh = make_mesh(**sizes, devices=devices)
    tensor: dict[str, Any] = {}
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        own = decoder_shardings(nnx.state(stack), stack.config, mesh)
        tensor |= {f"{name}.{key}": where for key, where in flat(own).items()}
    return Devices(mesh, tensor)


def sizes(params: Params) -> dict[str, int]:
    """Weights by stack."""
    found: dict[str, int] = {}
    for name, leaf in jax.tree.map(lambda w: int(w.size), params).items():
        found[name.partition(".")[0]] = found.get(name.partition(".")[0], 0) + leaf
    return found
