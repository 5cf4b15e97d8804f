"""The frozen model of a study: loaded, or of random weights where no name is given (smoke)."""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from experiments.lclm.model import fresh, tiny_config
from experiments.lclm.words import vocabulary
from experiments.models import open_model
from kvjax.io.tokenizer import Tokenizer
from kvjax.models.decoder import Decoder

BYTES = 257  # ids of a vocabulary of bytes and an end


def start(config: ConfigDict, shared: Path) -> tuple[Decoder, Tokenizer]:
    """The model and its tokenizer; points of a process share a loaded one."""
    if config.model.name:
        return open_model(config.model.name, config.dtype, "config.model.name")
    words = vocabulary([], BYTES, shared / "words.json")
    return made(config.model.tiny, words.vocab_size, config.seed, config.dtype), words


def made(tiny: ConfigDict, vocabulary: int, seed: int, dtype: str = "float32") -> Decoder:
    """A decoder of random weights."""
    return fresh(tiny_config(tiny, vocabulary, tiny.context), seed, dtype)
