"""What joins `expand` to a model: pieces as tokens, a conversation through a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from jax import Array

from kvjax.cache.segments import ModelCache
from kvjax.cache.transform import CacheTransform
from kvjax.cache.transform import cache as exact_cache
from kvjax.models.decoder import init_cache
from kvjax.models.generate import generate
from kvjax.soft.context import Context, prompt
from kvjax.soft.expand import Chunk, Piece, Turn
from kvjax.soft.layout import Region, Text
from kvjax.soft.model import LCLM


class Words(Protocol):
    """Text to ids and back; `kvjax.io`'s tokenizers are such."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Marks(NamedTuple):
    """What a chat model wants around turns."""

    before: str = ""  # what is said to the model
    between: str = ""  # behind that, before the reply
    after: str = "\n"  # behind the reply


PLAIN = Marks()
CHATML = Marks("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n")


def split(text: str, words: Words, size: int = 512) -> list[str]:
    """Chunks of at most `size` tokens whose concatenation is the text."""
    if size < 8:
        raise ValueError(f"size is {size}; use 8 tokens or more")
    ids, chunks, at = words.encode(text, add_special_tokens=False), [], 0
    while at < len(ids):
        end = min(at + size, len(ids))
        # A character of several tokens may straddle the cut; it moves to the next chunk whole.
        while end < len(ids) and end > at + 1 and words.decode(ids[at:end]).endswith("\ufffd"):
            end -= 1
        chunks.append(words.decode(ids[at:end]))
        at = end
    return chunks


def training_parts(
    turns: Sequence[Turn],
    chunks: Sequence[str],
    words: Words,
    encoder_words: Words,
    marks: Marks = PLAIN,
    ratio: int | None = None,
) -> list[Text | Region]:
    """An example's turns for `layout.lay_out`: loss on the replies and what ends them alone."""
    parts: list[Text | Region] = []

    def text(piece: str, trained: bool) -> None:
        ids = words.encode(piece, add_special_tokens=False)
        if ids:
            parts.append(Text(ids, trained))

    for pieces, trained in turns:
        text("" if trained else marks.before, False)
        for piece in pieces:
            if isinstance(piece, Chunk):
                raw = chunks[piece.number - 1]
                parts.append(Region(encoder_words.encode(raw, add_special_tokens=False), ratio))
            else:
                text(piece, trained)
        text(marks.after if trained else marks.between, trained)
    return parts


def sessions(
    model: LCLM,
    context: Context,
    words: Words,
    *,
    capacity: int,
    transform: CacheTransform | None = None,
    marks: Marks = PLAIN,
    max_new_tokens: int = 128,
    stop: Sequence[int] | None = None,
) -> Callable[[], Callable[[Sequence[Piece]], str]]:
    """What `ask` opens: greedy conversations about the chunks of a context.

    Args:
      model: the compressor.
      context: the soft tokens of each chunk.
      words: the decoder's tokenizer.
      capacity: the most decoder tokens of a conversation, replies included.
      transform: how the cache is kept; None: exactly.
      marks: what stands around turns.
      max_new_tokens: of a reply.
      stop: token ids that end a reply; None: the decoder's own.
    """
    kept = transform or exact_cache()
    stops = tuple(model.decoder.config.eos_ids if stop is None else stop)

    def open_session() -> Callable[[Sequence[Piece]], str]:
        cache: ModelCache = init_cache(model.decoder, kept, 1, capacity)
        owed: list[int] = []  # ids behind the last reply that the cache does not hold yet

        def say(pieces: Sequence[Piece]) -> str:
            nonlocal cache, owed
            fed = prompt(model, [owed, *_parts(pieces, context, words, marks)])
            found, cache = generate(
                model.decoder, fed, max_new_tokens=max_new_tokens, stop=stops, cache=cache,
                return_cache=True,
            )  # fmt: skip
            ids = [int(i) for i in found[0]]
            owed = words.encode(marks.after, add_special_tokens=False)
            if ids and ids[-1] in stops:  # the stop token is in the cache, but no part of the reply
                owed = owed[1:] if owed[:1] == ids[-1:] else owed
                ids = ids[:-1]
            return words.decode(ids)

        return say

    return open_session


def _parts(
    pieces: Sequence[Piece], context: Context, words: Words, marks: Marks
) -> list[Sequence[int] | Array]:
    parts: list[Sequence[int] | Array] = []
    for piece in (marks.before, *pieces, marks.between):
        if isinstance(piece, Chunk):
            parts.append(context[piece.number - 1])
        else:
            parts.append(words.encode(piece, add_special_tokens=False))
    return parts
