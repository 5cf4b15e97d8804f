"""What the points of one process share: the model, the tokens, and the exact cache's answers."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import kvjax
from experiments import record
from kvjax.data import load_text
from kvjax.models.decoder import step_hidden


class Session:
    """A loaded model, its texts as one batch, and the reference run with the exact cache."""

    def __init__(self, config: ConfigDict, shared: Path):
        self.model, tokenizer = kvjax.load(config.model, dtype=config.dtype)
        if tokenizer is None:
            raise ValueError(
                f"config.model={config.model!r}: no tokenizer.json, so no text goes in"
            )
        self.length, self.block = config.length, config.block
        self.capacity = config.length + config.decode_tokens
        self.tokens, self.hash = read_tokens(config, tokenizer)
        longest = self.model.config.context
        if self.capacity > longest:
            raise ValueError(
                f"config.length + config.decode_tokens={self.capacity}: the model's context is "
                f"{longest}; use less"
            )
        self._path = shared / f"reference-{self._key(config)}.npy"
        self._hidden: np.ndarray | None = None
        self._cache: Any = None

    def _key(self, config: ConfigDict) -> str:
        parts = [config.model, config.dtype, self.hash, config.length, config.block]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    def blocks(self):
        """(start, tokens [B, block]) of every step over the text."""
        for start in range(0, self.length, self.block):
            yield start, self.tokens[:, start : start + self.block]

    @property
    def reference(self) -> np.ndarray:
        """Final hidden states [B, T, E] float32 of the exact cache, kept on disk.

        Hidden states and not log-probabilities: 49,152 of those a token would be 100 times more.
        """
        if self._hidden is None and self._path.exists():
            self._hidden = np.load(self._path)
        if self._hidden is None:
            self._run_exact()
        assert self._hidden is not None
        return self._hidden

    @property
    def exact_cache(self) -> Any:
        """The exact cache holding the text, for its speed and its bytes."""
        if self._cache is None:
            self._run_exact()
        return self._cache

    def _run_exact(self) -> None:
        cache = kvjax.init_cache(
            self.model, kvjax.cache(), batch=len(self.tokens), capacity=self.capacity
        )
        parts = []
        for _, tokens in self.blocks():
            hidden, cache = step_hidden(self.model, tokens, cache, donate=True)
            parts.append(np.asarray(hidden, np.float32))
        self._hidden, self._cache = np.concatenate(parts, axis=1), cache
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._path.with_suffix(".part.npy")
            np.save(scratch, self._hidden)
            scratch.replace(self._path)


def read_tokens(config: ConfigDict, tokenizer: Any) -> tuple[jnp.ndarray, str]:
    """The first length + 1 tokens of each text as [B, length + 1] int32, and their hash."""
    rows = []
    for name in config.texts:
        ids = tokenizer.encode(load_text(name).text)
        if len(ids) <= config.length:
            raise ValueError(
                f"text {name!r} has {len(ids)} tokens; config.length={config.length} needs one "
                "more than that; take a longer text or a smaller length"
            )
        rows.append(ids[: config.length + 1])
    tokens = np.asarray(rows, np.int32)
    return jnp.asarray(tokens), hashlib.sha256(tokens.tobytes()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _open(config_json: str, shared: Path) -> Session:
    return Session(ConfigDict(json.loads(config_json)), shared)


def open_session(config: ConfigDict, shared: Path) -> Session:
    """The session of a point's config; points that differ only in how they keep it share one."""
    data = record.json.loads(config.to_json_best_effort())
    for field in ("cache", "soft", "compressor"):
        data.pop(field, None)
    return _open(json.dumps(data, sort_keys=True), shared)
