"""The kinds of document that a mixture is made of, from pieces of text and a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from kvjax.data import soft
from kvjax.data.soft import PHRASINGS, Parts, Tokens
from kvjax.data.words import ADJECTIVES, NOUNS
from kvjax.io.tokenizer import Tokenizer
from kvjax.soft import Row, SoftConfig, Text, lay_out
from kvjax.soft.expand import Directives, Reply, Turn, example
from kvjax.soft.reader import training_parts

RAW = 0  # in place of a ratio: nothing is compressed
FORM = Directives(rules="Reply with EXPAND or ANSWER.", due="Reply with ANSWER.")


class Asked(NamedTuple):
    """Numbers in chunks of text, and a question for one of them; chunks count from 1."""

    chunks: list[str]
    question: str
    answer: str
    needed: int


class Maker:
    """Makes rows. `data` is the config's; ids of texts come from `words`, the end from its eos."""

    def __init__(self, data: ConfigDict, words: Tokenizer, config: SoftConfig) -> None:
        self.data, self.words, self.config = data, words, config
        self.end = words.eos_ids[0]
        self.phrasings = [self.ids(text) for text in PHRASINGS]

    def ids(self, text: str) -> list[int]:
        return self.words.encode(text, add_special_tokens=False)

    def mixture(
        self, shares: ConfigDict, ratios: tuple[int, ...], reconstruction: bool
    ) -> Callable[[Tokens, np.random.Generator], Row]:
        """Draws the kind by its share, the ratio evenly, then the document."""
        kinds = [k for k in shares if reconstruction or k != "reconstruction"]
        weights = np.array([shares[k] for k in kinds], float)

        def make(tokens: Tokens, rng: np.random.Generator) -> Row:
            kind = kinds[int(rng.choice(len(kinds), p=weights / weights.sum()))]
            parts = self.parts(kind, tokens, rng, soft.draw_ratio(ratios, rng))
            return lay_out(parts, self.config)

        return make

    def parts(
        self, kind: str, tokens: Tokens, rng: np.random.Generator, ratio: int | None
    ) -> Parts:
        """One document of a kind; `raw_…` is the same with nothing compressed."""
        if kind == "raw_expand":  # answered at once
            asked = self.asked(tokens, rng, self.data.chunks)
            return self.turn(asked, None, Reply((), asked.answer), RAW)
        if kind.startswith("raw_"):
            return soft.raw(self.parts(kind.removeprefix("raw_"), tokens, rng, None))
        if kind == "text":
            return [Text(tokens)]
        if kind == "continual":
            return soft.continual(tokens, rng, ratio, tuple(self.data.spans))
        if kind == "reconstruction":
            piece = self.crop(tokens, rng, int(rng.integers(4, self.data.copied + 1)))
            return soft.reconstruction(piece, rng, ratio, self.phrasings, self.end)
        if kind == "needle":
            return self.needle(self.asked(tokens, rng, chunks=1), ratio)
        asked = self.asked(tokens, rng, self.data.chunks)
        made = example(FORM, asked.chunks, asked.question, (asked.needed,), asked.answer)
        turns = made[int(rng.integers(len(made)))]  # expanding first, or answering after it
        return training_parts(turns, asked.chunks, self.words, self.words, ratio=ratio)

    def crop(self, tokens: Tokens, rng: np.random.Generator, length: int) -> Tokens:
        at = int(rng.integers(max(len(tokens) - length, 0) + 1))
        return tokens[at : at + length]

    def asked(self, tokens: Tokens, rng: np.random.Generator, chunks: int) -> Asked:
        """`data.needles` numbers hidden in each of the chunks, which are consecutive text."""
        total = chunks * self.data.needles
        picks = rng.choice(len(ADJECTIVES) * len(NOUNS), total, replace=False)
        names = [f"{ADJECTIVES[i // len(NOUNS)]} {NOUNS[i % len(NOUNS)]}" for i in picks]
        numbers = [str(n) for n in rng.integers(10 ** (self.data.digits - 1),
                                                10**self.data.digits, total)]  # fmt: skip
        size = min(self.data.chunk, len(tokens) // chunks)
        texts = []
        for i in range(chunks):
            piece = tokens[i * size : (i + 1) * size]
            own = range(i * self.data.needles, (i + 1) * self.data.needles)
            cuts = sorted(int(c) for c in rng.integers(len(piece) + 1, size=len(own)))
            bounds = [0, *cuts, len(piece)]
            text = self.words.decode(piece[: bounds[1]])
            for n, k in enumerate(own):
                text += f" The {names[k]} is {numbers[k]}. "
                text += self.words.decode(piece[bounds[n + 1] : bounds[n + 2]])
            texts.append(text)
        k = int(rng.integers(total))
        question = f"What is the {names[k]}?"
        return Asked(texts, question, numbers[k], k // self.data.needles + 1)

    def needle(self, asked: Asked, ratio: int | None) -> Parts:
        """One compressed chunk, the question, the number."""
        context, question = self.ids(asked.chunks[0]), f"\nQuestion: {asked.question}\nANSWER:"
        reply = [*self.ids(f" {asked.answer}"), self.end]
        return soft.answer(context, self.ids(question), reply, ratio)

    def turn(
        self, asked: Asked, expanded: int | None, said: Reply, ratio: int | None
    ) -> Parts:
        """A prompt with at most one chunk expanded, and a reply, alone counted."""
        known = {} if expanded is None else {expanded: asked.chunks[expanded - 1]}
        opening = FORM.opening(len(asked.chunks), asked.question, known, False)
        turns = [Turn(opening, False), Turn([FORM.reply(said)], True)]
        chosen = None if ratio == RAW else ratio
        parts = training_parts(turns, asked.chunks, self.words, self.words, ratio=chosen)
        return soft.raw(parts) if ratio == RAW else parts
