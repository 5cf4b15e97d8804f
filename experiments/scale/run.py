"""The programs of a point: chunk and step of the decoder, an encoder pass, a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

import kvjax
from experiments.scale import programs
from kvjax.soft import SoftConfig

Once = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]


def inference(config: ConfigDict, once: Once) -> dict[str, Any]:
    """The peak of a chip for every context: of encoding, and of prefill and decoding behind it."""
    where = programs.tpu_slice(config.slice)
    encoder = None
    if config.ratio > 1:
        encoder = once(
            f"encoder-{config.ratio}",
            lambda: programs.encoder_pass(where, soft(config.ratio), config.windows),
        )
    held = encoder["weights_bytes"] if encoder else 0  # on every chip while the decoder runs
    curve = []
    for context in config.contexts:
        steps = {name: _step(config, once, where, context, tokens)
                 for name, tokens in (("prefill", config.chunk), ("decode", 1))}  # fmt: skip
        decoder = held + max(step["peak_bytes"] for step in steps.values())
        curve.append(
            {
                "context": context,
                "decoder_bytes": decoder,
                "encoder_bytes": encoder["peak_bytes"] if encoder else 0,
                "peak_bytes": max(decoder, encoder["peak_bytes"] if encoder else 0),
                "fits": all(x["fits"] for x in (*steps.values(), *filter(None, [encoder]))),
                **steps,
            }
        )
    scale = {"slice": config.slice, "chips": len(where.devices), "chunk": config.chunk}
    return {"scale": scale, "curve": curve, **({"encoder": encoder} if encoder else {})}


def _step(
    config: ConfigDict, once: Once, where: programs.Slice, context: int, tokens: int
) -> dict[str, Any]:
    capacity = max(context // config.ratio, config.least)
    transform = kvjax.cache(encode=kvjax.encode.from_config(config.encode), sink=config.sink)
    return once(
        f"{config.encode}-{capacity}-{tokens}",
        lambda: programs.decoder_step(where, programs.QWEN3_4B, transform, tokens, capacity),
    )


def soft(ratio: int) -> SoftConfig:
    """The released setting; the markers are the last three rows of the vocabulary."""
    end = programs.QWEN3_4B.vocab_size
    return SoftConfig(end - 3, end - 2, end - 1, ratios=(ratio,), window=1024)


def training(config: ConfigDict, once: Once) -> dict[str, Any]:
    """One step of `config.rows` packed rows, as many micro-batches as the slice needs."""
    where = programs.tpu_slice(config.slice)
    chips = len(where.devices)
    recipe = sized(config, chips)
    found = once("training", lambda: programs.training_step(where, recipe, soft(config.ratio)))
    shape = recipe.shape
    scale = {
        "slice": config.slice,
        "chips": chips,
        "rows": shape.rows * shape.micro,
        "length": shape.length,
        "micro": shape.micro,
        "tokens": shape.rows * shape.micro * shape.length,
        "encoder_tokens": shape.windows * shape.micro * 1024,
    }
    return {"scale": scale, "step": found}


def sized(config: ConfigDict, chips: int) -> ConfigDict:
    """The recipe on so many chips: the step's rows as before, in micro-batches that fit."""
    recipe = config.recipe.copy_and_resolve_references().unlock()
    rows = min(chips * config.rows_a_chip, config.rows)
    if config.rows % rows:
        raise ValueError(f"config.training.rows={config.rows}: use a multiple of {rows}")
    windows = recipe.shape.windows // recipe.shape.rows  # a row's, if it is compressed whole
    a_pass = recipe.shape.windows_per_pass // recipe.shape.rows
    recipe.mesh.fsdp = chips
    recipe.shape.update({"rows": rows, "micro": config.rows // rows, "windows": windows * rows,
                         "windows_per_pass": a_pass * rows})  # fmt: skip
    return recipe
