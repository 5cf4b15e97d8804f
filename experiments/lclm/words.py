"""Texts as tokens: a vocabulary of bytes or trained pairs, documents cut, some of them held out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from ml_collections import ConfigDict
from tokenizers import decoders, pre_tokenizers, trainers

from kvjax.data import load_text, titles
from kvjax.io.tokenizer import Tokenizer

END = "<|end|>"


class Corpus(NamedTuple):
    """Documents of at most `data.document` tokens."""

    train: list[Any]  # each [T] int32
    held_out: list[Any]


def texts(config: ConfigDict) -> tuple[list[str], list[str]]:
    """The sources' texts: those to train on, and every `data.held_out`-th, which is held out."""
    train: list[str] = []
    held: list[str] = []
    for source in config.data.sources:
        names = titles(source)
        for i, title in enumerate(names[: config.data.titles or len(names)]):
            side = held if i % config.data.held_out == config.data.held_out - 1 else train
            side.append(load_text(f"{source}/{title}").text)
    if not train or not held:
        raise ValueError(
            f"config.data: {len(train)} texts to train on, {len(held)} held out; name more sources "
            "or titles, or lower data.held_out"
        )
    return train, held


def vocabulary(train: list[str], size: int, path: Path) -> Tokenizer:
    """A byte-level vocabulary of `size` ids, kept at `path`: 257 are bytes alone and an end."""
    if not path.exists():
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True),
             pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )  # fmt: skip
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=[END], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
        backend.train_from_iterator(train, trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
        backend.save(str(scratch))
        os.replace(scratch, path)
    backend = tokenizers.Tokenizer.from_file(str(path))
    end = backend.token_to_id(END)
    assert end is not None
    return Tokenizer(backend, eos_ids=[end])


def corpus(config: ConfigDict, sides: tuple[list[str], list[str]], words: Tokenizer) -> Corpus:
    """Both sides as documents."""
    return Corpus(*(_cut(side, words, config.data.document) for side in sides))


def _cut(side: list[str], words: Tokenizer, length: int) -> list[np.ndarray]:
    """Consecutive pieces of `length` tokens; a rest of less than half is left out."""
    pieces: list[np.ndarray] = []
    for text in side:
        ids = np.asarray(words.encode(text, add_special_tokens=False), np.int32)
        cuts = [ids[at : at + length] for at in range(0, len(ids), length)]
        pieces += [cut for cut in cuts if 2 * len(cut) >= length]
    return pieces
