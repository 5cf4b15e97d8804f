"""The frozen model of a study: loaded, or of random weights where no name is given (smoke)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from experiments.lclm.model import tiny_config
from experiments.lclm.words import vocabulary
from experiments.models import open_model
from kvjax.io.tokenizer import Tokenizer
from kvjax.models.config import tensor_shapes
from kvjax.models.decoder import Decoder

BYTES = 257  # ids of a vocabulary of bytes and an end


def start(config: ConfigDict, shared: Path) -> tuple[Decoder, Tokenizer]:
    """The model and its tokenizer; points of a process share a loaded one."""
    if config.model.name:
        return open_model(config.model.name, config.dtype, "config.model.name")
    words = vocabulary([], BYTES, shared / "words.json")
    return made(config.model.tiny, words.vocab_size, config.seed, config.dtype), words


def made(tiny: ConfigDict, vocabulary: int, seed: int, dtype: str = "float32") -> Decoder:
    """A decoder of random weights that does attend."""
    config = tiny_config(tiny, vocabulary, tiny.context)
    draw, tensors = np.random.default_rng(seed), {}
    for name, shape in tensor_shapes(config).items():
        drawn = draw.normal(0, 1 / math.sqrt(shape[-1]), shape)
        tensors[name] = (drawn if len(shape) > 1 else np.ones(shape)).astype(np.float32)
    return Decoder(config, tensors, dtype)
