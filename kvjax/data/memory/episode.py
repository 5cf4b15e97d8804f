"""What every memory benchmark is made of: a history of messages, and questions asked after it."""

import random
from collections.abc import Callable
from typing import NamedTuple, Protocol


class Question(NamedTuple):
    """One question about an episode.

    Any of `answers` is right. `old` holds answers that were right before an update and no longer
    are, so that a stale reply can be told from a wrong one. `kind` groups results ("single",
    "multi-hop", "abstain", …). `when` is the index of the message with the newest evidence.
    """

    text: str
    answers: tuple[str, ...]
    old: tuple[str, ...] = ()
    kind: str = ""
    when: int = 0


class Episode(NamedTuple):
    """`messages` in order, each one turn or chunk, injected once; then all `questions`."""

    messages: tuple[str, ...]
    questions: tuple[Question, ...]


class MemoryBenchmark(Protocol):
    """Episodes from a seed or a file, and the official rule for a reply."""

    @property
    def name(self) -> str: ...

    def episodes(self, count: int, seed: int = 0) -> list[Episode]:
        """`count` episodes, the same from the same settings and seed on every machine."""
        ...

    def score(self, question: Question, reply: str) -> float:
        """In [0, 1]: `reply` is what the model wrote after the question, alone."""
        ...


def draw(
    name: str, count: int, seed: int, make: Callable[[random.Random], Episode]
) -> list[Episode]:
    """`count` episodes; each has a generator of its own, by name, seed and place in the list."""
    if count < 1:
        raise ValueError(f"count: {count}; ask for at least 1 episode")
    return [make(random.Random(f"{name}/{seed}/{i}")) for i in range(count)]


def between(field: str, value: int, low: int, high: int) -> None:
    """`ValueError` unless `value` is from `low` to `high`."""
    if not low <= value <= high:
        raise ValueError(f"{field}: {value}; choose {low} to {high}")
