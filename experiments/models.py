"""A model with its tokenizer, as the studies that ask it questions need it."""

from functools import lru_cache

import kvjax
from kvjax.io.tokenizer import Tokenizer
from kvjax.models.decoder import Decoder


@lru_cache(maxsize=1)
def open_model(name: str, dtype: str, field: str = "config.model") -> tuple[Decoder, Tokenizer]:
    """Model and tokenizer; the points of a process share them. `ValueError`, naming the config's
    field, where a folder has no tokenizer."""
    model, tokenizer = kvjax.load(name, dtype=dtype)
    if tokenizer is None:
        raise ValueError(f"{field}={name!r}: no tokenizer.json, so no text goes in")
    return model, tokenizer
