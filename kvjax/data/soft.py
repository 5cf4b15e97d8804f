"""Training examples for a soft-token compressor: three kinds of document, as `lay_out` takes them.

Encoder and decoder share their token ids here (as Qwen3's do).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.soft import Region, Text

Tokens = Any  # ids, in a sequence or a NumPy array
Parts = list[Text | Region]

_ASK = ("Repeat", "Write out", "Copy", "Reproduce", "Restore", "Recite")
_WHAT = ("the text above", "the passage", "the document", "what you were given")
_HOW = ("word for word", "exactly", "verbatim", "without any change")
# Many wordings, so that the request is understood and not one string of it learnt by heart.
PHRASINGS = tuple(f"\n{a} {b} {c}:\n" for a, b, c in itertools.product(_ASK, _WHAT, _HOW))


def continual(
    tokens: Tokens, rng: np.random.Generator, ratio: int | None, spans: tuple[int, int]
) -> Parts:
    """Continual pre-training: spans of random length, every other one compressed; loss on the rest.

    Args:
      tokens: the document.
      rng: draws the lengths, and whether the first span is compressed.
      ratio: N of every region; None: the model's first.
      spans: the shortest and the longest span, in tokens.
    """
    at, wrapped, parts = 0, bool(rng.integers(2)), Parts()
    while at < len(tokens):
        end = at + int(rng.integers(spans[0], spans[1] + 1))
        span = tokens[at:end]
        parts.append(Region(span, ratio) if wrapped else Text(span))
        at, wrapped = end, not wrapped
    return parts


def reconstruction(
    tokens: Tokens,
    rng: np.random.Generator,
    ratio: int | None,
    phrasings: Sequence[Tokens],
    end: int | None = None,
) -> Parts:
    """A compressed document, a request to repeat it, and the document word for word.

    Args:
      tokens: the document.
      rng: draws the phrasing.
      ratio: N.
      phrasings: requests (`PHRASINGS`), tokenized.
      end: an id behind the copy, trained on; None: nothing.
    """
    asked = phrasings[int(rng.integers(len(phrasings)))]
    copy = [*tokens] if end is None else [*tokens, end]
    return [Region(tokens, ratio), Text(asked, False), Text(copy)]


def answer(context: Tokens, question: Tokens, reply: Tokens, ratio: int | None) -> Parts:
    """Supervised fine-tuning: a compressed context, a question, and the reply, alone trained on."""
    return [Region(context, ratio), Text(question, False), Text(reply)]


def raw(parts: Parts) -> Parts:
    """The same document with nothing compressed; what was a region is not trained on."""
    return [Text(part.tokens, False) if isinstance(part, Region) else part for part in parts]


def draw_ratio(ratios: Sequence[int], rng: np.random.Generator) -> int:
    """One of the ratios, evenly: one model for all of them."""
    return int(ratios[int(rng.integers(len(ratios)))])
