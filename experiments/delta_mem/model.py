"""The frozen model of a study: loaded, or of random weights where no name is given (smoke)."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

import kvjax
from experiments.lclm.words import vocabulary
from kvjax.io.tokenizer import Tokenizer
from kvjax.models.config import DecoderConfig, LayerConfig, tensor_shapes
from kvjax.models.decoder import Decoder

BYTES = 257  # ids of a vocabulary of bytes and an end


def start(config: ConfigDict, shared: Path) -> tuple[Decoder, Tokenizer]:
    """The model and its tokenizer; points of a process share a loaded one."""
    if config.model.name:
        return _loaded(config.model.name, config.dtype)
    words = vocabulary([], BYTES, shared / "words.json")
    return made(config.model.tiny, words.vocab_size, config.seed, config.dtype), words


@lru_cache(maxsize=1)
def _loaded(name: str, dtype: str) -> tuple[Decoder, Tokenizer]:
    model, words = kvjax.load(name, dtype=dtype)
    if words is None:
        raise ValueError(f"config.model.name={name!r}: no tokenizer.json, so no text goes in")
    return model, words


def made(tiny: ConfigDict, vocabulary: int, seed: int, dtype: str = "float32") -> Decoder:
    """A decoder of random weights that does attend."""
    config = DecoderConfig(
        family="qwen3", vocab_size=vocabulary, hidden_size=tiny.hidden,
        intermediate_size=tiny.mlp, num_heads=tiny.heads, num_kv_heads=tiny.kv_heads,
        head_dim=tiny.head_dim, layers=(LayerConfig(),) * tiny.layers, context=tiny.context,
        qk_norm=True, tie_embeddings=True,
    )  # fmt: skip
    draw, tensors = np.random.default_rng(seed), {}
    for name, shape in tensor_shapes(config).items():
        drawn = draw.normal(0, 1 / math.sqrt(shape[-1]), shape)
        tensors[name] = (drawn if len(shape) > 1 else np.ones(shape)).astype(np.float32)
    return Decoder(config, tensors, dtype)
