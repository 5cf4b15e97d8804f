"""A row of soft tokens: each block that is behind is in the cache as a compressor's soft tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import kvjax
from experiments.compressor import open_compressor
from experiments.head_to_head.session import Session
from kvjax.models.decoder import step_hidden
from kvjax.soft import encode_context, prompt


class SoftTokens:
    """What reads block by block: raw while it is read, afterwards as soft tokens between markers.

    `session.model` is what the compressor was made of.
    """

    def __init__(self, session: Session, folder: str, ratio: int, transform: Any) -> None:
        self.soft = open_compressor(folder, session.model.config, session.model.dtype)
        self.model, self.ratio = self.soft.decoder, ratio
        blocks, length = session.length // session.block, session.block
        room = blocks * (-(-length // ratio) + 2)  # the last block's raw tokens fit too
        room += max(length, session.capacity - session.length)
        self.cache = kvjax.init_cache(self.model, transform, len(session.tokens), room)

    def hidden_of(self, tokens: Array) -> Array:
        """tokens [B,T] -> [B,T,E]; the cache holds them as soft tokens afterwards."""
        hidden, _ = step_hidden(self.model, tokens, self.cache)
        context = encode_context(self.soft, list(np.asarray(tokens)), self.ratio)
        inputs = jnp.concatenate([prompt(self.soft, [rows]) for rows in context.documents])
        _, self.cache = step_hidden(self.model, inputs, self.cache, donate=True)
        self.cache = jax.block_until_ready(kvjax.finish(self.model, self.cache))
        return hidden
