"""The small reference model, and documents rebuilt from its token ids."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from kvjax.models.config import config_from_hf
from kvjax.models.decoder import Decoder
from kvjax.soft import LCLM, Region, SoftConfig, Text
from kvjax.soft.adapter import Adapter

FILE = Path(__file__).parents[1] / "golden" / "lclm" / "lclm.safetensors"
START, MEMORY, END = 107, 108, 109


@functools.cache
def reference() -> tuple[dict, dict]:
    with safe_open(FILE, "np") as file:
        header = {k: json.loads(v) for k, v in file.metadata().items() if v[:1] in "{["}
    return load_file(FILE), header


def part(prefix: str) -> dict[str, np.ndarray]:
    """The tensors below a prefix, without it."""
    return {k[len(prefix) :]: v for k, v in reference()[0].items() if k.startswith(prefix)}


def settings(**changes) -> SoftConfig:
    plain = SoftConfig(START, MEMORY, END, ratios=(8,), window=32)
    return dataclasses.replace(plain, **changes)


@functools.cache
def stacks() -> tuple[Decoder, Decoder]:
    _, header = reference()
    encoder = config_from_hf(header["encoder_config"] | {"tie_word_embeddings": True})
    decoder = config_from_hf(header["decoder_config"])
    return Decoder(encoder, part("encoder.")), Decoder(decoder, part("decoder."))


@functools.cache
def model(config: SoftConfig) -> LCLM:
    encoder, decoder = stacks()
    weights = part("adapter_concat4." if config.pooling == "concat" else "adapter.")
    adapter = Adapter(config, encoder.config, decoder.config, weights)
    return LCLM(encoder, adapter, decoder, config)


def parts(ids: np.ndarray, labels: np.ndarray, regions: list[np.ndarray]) -> list[Text | Region]:
    """A document from what the decoder saw of it: text runs and, in their places, regions."""
    found, at, left = [], 0, list(regions)
    while at < len(ids):
        if ids[at] == START:
            found.append(Region(left.pop(0)))
            at += list(ids[at:]).index(END) + 1
        else:
            found.append(Text(ids[at : at + 1], trained=bool(labels[at] != -100)))
            at += 1
    return found


@pytest.fixture
def plain() -> LCLM:
    return model(settings())
