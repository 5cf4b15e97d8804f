"""A fact, then so many turns about other people, then the question: how long a memory holds it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from kvjax.data.memory import Episode, Question
from kvjax.data.memory.words import CITIES, COLORS, FOODS, PEOPLE, SPORTS

_FILLERS = (
    ("{} took the train to {} today.", CITIES),
    ("{} went to play {} in the park.", SPORTS),
    ("{} cooked {} for dinner.", FOODS),
    ("{} wrote a letter to {}.", PEOPLE),
)


@dataclass(frozen=True)
class Recall:
    """`facts` facts in the first turns, `turns` turns after the last of them, a question for each.

    Turns name neither the people nor the colours of the facts.

    Raises:
      ValueError: naming the field.
    """

    turns: int = 10
    facts: int = 1
    name: ClassVar[str] = "recall"

    def __post_init__(self) -> None:
        if self.turns < 0:
            raise ValueError(f"turns={self.turns}: use 0 or more")
        if not 1 <= self.facts <= len(PEOPLE) // 2:
            raise ValueError(f"facts={self.facts}: use 1 to {len(PEOPLE) // 2}")

    def episodes(self, count: int, seed: int = 0) -> list[Episode]:
        """`count` episodes, the same from the same settings and seed."""
        return [self._episode(random.Random(f"recall/{seed}/{i}")) for i in range(count)]

    def _episode(self, rng: random.Random) -> Episode:
        people = rng.sample(PEOPLE, len(PEOPLE))
        known, others = people[: self.facts], people[self.facts :]
        colors = [rng.choice(COLORS) for _ in known]
        told = [f"{p}'s favorite color is {c}." for p, c in zip(known, colors, strict=True)]
        for _ in range(self.turns):
            form, things = rng.choice(_FILLERS)
            person = rng.choice(others)
            told.append(form.format(person, rng.choice([t for t in things if t not in known])))
        asked = [
            Question(f"What is {p}'s favorite color?", (c,), when=i)
            for i, (p, c) in enumerate(zip(known, colors, strict=True))
        ]
        return Episode(tuple(told), tuple(asked))

    def score(self, question: Question, reply: str) -> float:
        """1 where the reply is the colour and nothing else."""
        said = reply.strip().strip(".").lower()
        return float(said in (answer.lower() for answer in question.answers))
