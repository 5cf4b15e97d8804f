"""Retrieval tasks made from a seed and scaled to a context: lines, a passkey, needles.

Each task is a frozen dataclass with a token budget, `examples(tokenizer, count, seed)` and
`score(text, example)`. The budget bounds the prompt alone: leave room for the answer and, in style
"chat", for the markup around it. Style "completion" ends in the middle of a sentence that
`Example.target` continues (" 48213"), for models too small to follow a question: compare greedy
text, or force the target and look at its tokens' ranks. The same seed gives the same prompts
everywhere; `info["position"]` counts the tokens before the fact asked for.
"""

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal, Protocol

from kvjax.data.corpora import load_text
from kvjax.data.task import Example, Scores
from kvjax.data.words import ADJECTIVES, NOUNS

Style = Literal["completion", "chat"]
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
MAX_KEYS = len(ADJECTIVES) * len(NOUNS)


class Encodes(Protocol):
    """All that is needed of a tokenizer: a text's ids."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Lines:
    """Line retrieval (LongEval, Li et al. 2023; KVarN, arXiv 2606.03458, with 100 to 600 lines).

    `lines` of "line <key>: REGISTER_CONTENT is <number>", one of them asked for; None: as many as
    fit into `tokens`. `info`: lines, line (0 is the first), depth in [0, 1], position.
    """

    tokens: int
    lines: int | None = None
    style: Style = "completion"
    name: ClassVar[str] = "lines"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    def __post_init__(self) -> None:
        _check(self.tokens, self.style)
        if self.lines is not None and not 1 <= self.lines <= MAX_KEYS:
            raise ValueError(
                f"lines: {self.lines}; choose 1 to {MAX_KEYS}, or None for all that fit"
            )

    def examples(self, tokenizer: Encodes, count: int, seed: int = 0) -> list[Example]:
        """`count` examples, the line asked for drawn evenly."""
        return [self._example(tokenizer, _random(self.name, seed, i)) for i in range(count)]

    def score(self, text: str, example: Example) -> Scores:
        """LongEval's rule for an answer: its last number. For a completion: its first."""
        rule = _first if self.style == "completion" else _last
        return {"accuracy": float(rule(text, example.answer))}

    def _example(self, tokenizer: Encodes, rng: random.Random) -> Example:
        keys, share = _keys(rng, MAX_KEYS), rng.random()
        numbers = [_digits(rng, 5) for _ in keys]
        rows = [
            f"line {key}: REGISTER_CONTENT is <{n}>" for key, n in zip(keys, numbers, strict=True)
        ]

        def prompt(count: int) -> str:
            key = keys[int(share * count)]
            return "\n".join([_LINES_HEAD, *rows[:count], _LINES_ASK[self.style].format(key=key)])

        count = self.lines or _most(prompt, tokenizer, self.tokens, MAX_KEYS)
        line = int(share * count)
        info = {"lines": count, "line": line, "depth": line / max(count - 1, 1)}
        target = f" <{numbers[line]}>"
        return _placed(prompt(count), numbers[line], target, rows[line], info, tokenizer, self)


@dataclass(frozen=True)
class Passkey:
    """A five-digit key in noise (Mohtashami and Jaggi, arXiv 2305.16300).

    `depths` in [0, 1]: the share of the noise that stands before the key. `info`: depth, position.
    """

    tokens: int
    depths: tuple[float, ...] = DEPTHS
    style: Style = "completion"
    name: ClassVar[str] = "passkey"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    def __post_init__(self) -> None:
        _check(self.tokens, self.style, self.depths)

    def examples(self, tokenizer: Encodes, count: int, seed: int = 0) -> list[Example]:
        """`count` examples for each depth, depth by depth."""
        return [
            self._example(tokenizer, depth, rng)
            for depth, rng in _by_depth(self.name, self.depths, seed, count)
        ]

    def score(self, text: str, example: Example) -> Scores:
        """1 where the key is among the answer's numbers; where it is a completion's first."""
        rule = _first if self.style == "completion" else _contains
        return {"accuracy": float(rule(text, example.answer))}

    def _example(self, tokenizer: Encodes, depth: float, rng: random.Random) -> Example:
        key = _digits(rng, 5)
        fact = f"The pass key is {key}. Remember it. {key} is the pass key."

        def prompt(count: int) -> str:
            noise = [_NOISE[i % len(_NOISE)] for i in range(count)]
            at = round(depth * count)
            parts = [" ".join(noise[:at]), fact, " ".join(noise[at:])]
            return "\n".join([_PASSKEY_HEAD, *filter(None, parts), _PASSKEY_ASK[self.style]])

        count = _most(prompt, tokenizer, self.tokens)
        return _placed(prompt(count), key, f" {key}", fact, {"depth": depth}, tokenizer, self)


@dataclass(frozen=True)
class Needles:
    """`needles` magic numbers in real text, one asked for (NIAH as RULER words it, 2404.06654).

    `texts` are names for `load_text`, joined in this order and entered at a random sentence, so
    they must hold more than `tokens` tokens. The needle asked for stands at one of `depths`, after
    that share of the text's characters, at the next sentence's end; the others anywhere.
    `info`: depth, needles, position.
    """

    tokens: int
    texts: tuple[str, ...]
    needles: int = 1
    depths: tuple[float, ...] = DEPTHS
    style: Style = "completion"
    name: ClassVar[str] = "needles"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    def __post_init__(self) -> None:
        _check(self.tokens, self.style, self.depths)
        if not self.texts or isinstance(self.texts, str):
            raise ValueError("texts: name at least one text, in a tuple, as load_text takes it")
        if not 1 <= self.needles <= MAX_KEYS:
            raise ValueError(f"needles: {self.needles}; choose 1 to {MAX_KEYS}")

    def examples(self, tokenizer: Encodes, count: int, seed: int = 0) -> list[Example]:
        """`count` examples for each depth, depth by depth."""
        pieces = _sentences("\n\n".join(load_text(name).text for name in self.texts))
        return [
            self._example(tokenizer, pieces, depth, rng)
            for depth, rng in _by_depth(self.name, self.depths, seed, count)
        ]

    def score(self, text: str, example: Example) -> Scores:
        """1 where the number is among the answer's numbers; where it is a completion's first."""
        rule = _first if self.style == "completion" else _contains
        return {"accuracy": float(rule(text, example.answer))}

    def _example(
        self, tokenizer: Encodes, pieces: list[str], depth: float, rng: random.Random
    ) -> Example:
        keys, start = _keys(rng, self.needles), rng.randrange(len(pieces))
        pieces = pieces[start:] + pieces[:start]
        answers = [_digits(rng, 7) for _ in keys]
        facts = [
            f"One of the special magic numbers for {key} is: {answer}. "
            for key, answer in zip(keys, answers, strict=True)
        ]
        depths = [depth, *(rng.random() for _ in keys[1:])]

        def prompt(count: int) -> str:
            text = _insert(pieces[:count], facts, depths)
            return (
                f"{_NEEDLES_HEAD}\n{text.strip()}\n{_NEEDLES_ASK[self.style].format(key=keys[0])}"
            )

        count = _most(prompt, tokenizer, self.tokens, len(pieces))
        if count == len(pieces):
            raise ValueError(f"texts: fewer than {self.tokens} tokens in {self.texts}; name more")
        info = {"depth": depth, "needles": self.needles}
        fact = facts[0].strip()
        return _placed(prompt(count), answers[0], f" {answers[0]}", fact, info, tokenizer, self)


# The texts of the sources above; "completion" stops where the answer would stand.

_LINES_HEAD = """\
Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and \
contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, \
memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to \
retrieve the corresponding <REGISTER_CONTENT> of a certain line index. Now the record start:
"""
_LINES_ASK: dict[Style, str] = {
    "chat": """
Now the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number.""",
    "completion": """
Now the record is over. Again, the line asked for:

line {key}: REGISTER_CONTENT is""",
}
_NOISE = [
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
]
_PASSKEY_HEAD = """\
There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will \
quiz you about the important information there."""
_PASSKEY_ASK: dict[Style, str] = {
    "chat": "What is the pass key?",
    "completion": "What is the pass key? The pass key is",
}
_NEEDLES_HEAD = """\
Some special magic numbers are hidden within the following text. Make sure to memorize them. I \
will quiz you about the numbers afterwards."""
_QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
_NEEDLES_ASK: dict[Style, str] = {
    "chat": _QUESTION,
    "completion": _QUESTION + " One of the special magic numbers for {key} is:",
}


def _check(tokens: int, style: str, depths: Sequence[float] = DEPTHS) -> None:
    if tokens < 1:
        raise ValueError(f"tokens: {tokens}; a budget is at least 1 token")
    if style not in ("completion", "chat"):
        raise ValueError(f"style: {style!r}; choose 'completion' or 'chat'")
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths: {tuple(depths)}; give at least one, each from 0 to 1")


def _random(name: str, seed: int, *parts: object) -> random.Random:
    """A generator for one example, the same on every machine."""
    return random.Random("/".join(map(str, (name, seed, *parts))))


def _by_depth(
    name: str, depths: Sequence[float], seed: int, count: int
) -> Iterator[tuple[float, random.Random]]:
    for depth in depths:
        yield from ((depth, _random(name, seed, depth, i)) for i in range(count))


def _keys(rng: random.Random, count: int) -> list[str]:
    """Different adjective-noun pairs in random order."""
    picked = rng.sample(range(MAX_KEYS), count)
    return [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in picked]


def _digits(rng: random.Random, count: int) -> str:
    """A number of `count` digits, so that every answer takes as many tokens."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def _most(
    prompt: Callable[[int], str], tokenizer: Encodes, tokens: int, limit: int | None = None
) -> int:
    """The largest count, at least 1, whose prompt fits into `tokens`; at most `limit`."""

    def fits(count: int) -> bool:
        return len(tokenizer.encode(prompt(count))) <= tokens

    if not fits(1):
        least = len(tokenizer.encode(prompt(1)))
        raise ValueError(f"tokens: {tokens}; the shortest prompt already takes {least}")
    low, high = 1, 2
    while (limit is None or high <= limit) and fits(high):
        low, high = high, 2 * high
    high = high if limit is None else min(high, limit + 1)
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _sentences(text: str) -> list[str]:
    """Pieces that end after a sentence or a line, white space included; joined they are `text`."""
    return re.findall(r".+?(?:[.!?]\s+|\n+|\Z)", text.strip(), re.DOTALL)


def _insert(pieces: list[str], facts: list[str], depths: list[float]) -> str:
    """`pieces` joined, each fact after the piece that ends at or next after its depth."""
    ends = list(accumulate(map(len, pieces), initial=0))
    after: list[list[str]] = [[] for _ in ends]
    for fact, depth in zip(facts, depths, strict=True):
        after[bisect_left(ends, depth * ends[-1])].append(fact)
    return "".join(piece + "".join(here) for piece, here in zip(["", *pieces], after, strict=True))


def _placed(
    prompt: str, answer: str, target: str, fact: str, info: dict, tokenizer: Encodes,
    task: Lines | Passkey | Needles,
) -> Example:  # fmt: skip
    """The example, with the position of `fact`; `ValueError` where it is over the budget."""
    length = len(tokenizer.encode(prompt))
    if length > task.tokens:
        raise ValueError(
            f"tokens: {task.tokens}; this {task.name} prompt takes {length}: ask for less in it"
        )
    position = len(tokenizer.encode(prompt[: prompt.index(fact)]))
    return Example(
        prompt, answer, target if task.style == "completion" else "", info | {"position": position}
    )


def _first(text: str, answer: str) -> bool:
    return re.findall(r"\d+", text)[:1] == [answer]


def _last(text: str, answer: str) -> bool:
    return re.findall(r"\d+", text)[-1:] == [answer]


def _contains(text: str, answer: str) -> bool:
    return answer in re.findall(r"\d+", text)
