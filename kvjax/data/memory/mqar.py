"""Multi-query associative recall (Zoology, arXiv 2312.04927) as ids, for what a state can hold.

No text and no model: keys and values are ids of vectors that a study draws, so that what is
measured is the update rule alone.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from kvjax.data.memory.episode import between


class Recall(NamedTuple):
    """`batch` sequences, all int32: W writes one after the other, then Q queries.

    keys, values [batch, W]: what is written. queries [batch, Q]: each key once, in random order.
    answers [batch, Q]: the value written last under the query. old [batch, Q]: the value that
    stood there before, or -1 where nothing was overwritten.
    """

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray
    answers: np.ndarray
    old: np.ndarray


@dataclass(frozen=True)
class MQAR:
    """`pairs` keys with a value each, of which `overwrites` are written again with another value.

    W = pairs + overwrites, Q = pairs. Ids are drawn from `keys` keys and `values` values; an
    overwrite stands anywhere after the write that it replaces, which no other key shares.
    """

    pairs: int = 16
    overwrites: int = 0
    keys: int = 256
    values: int = 256
    name: ClassVar[str] = "mqar"

    def __post_init__(self) -> None:
        between("pairs", self.pairs, 1, self.keys)
        between("overwrites", self.overwrites, 0, self.pairs)
        if self.values < 2:
            raise ValueError(f"values: {self.values}; choose at least 2, to overwrite one")

    def draw(self, batch: int, seed: int = 0) -> Recall:
        """`batch` sequences, the same from the same settings and seed."""
        if batch < 1:
            raise ValueError(f"batch: {batch}; draw at least 1 sequence")
        rng = np.random.default_rng([seed, self.pairs, self.overwrites, self.keys, self.values])
        rows = [self._sequence(rng) for _ in range(batch)]
        return Recall(*(np.stack(part).astype(np.int32) for part in zip(*rows, strict=True)))

    def _sequence(self, rng: np.random.Generator) -> Recall:
        keys = rng.choice(self.keys, self.pairs, replace=False)
        first = rng.integers(self.values, size=self.pairs)
        shift = rng.integers(1, self.values, size=self.overwrites)  # never the same value again
        newest, old = first.copy(), np.full(self.pairs, -1)
        old[: self.overwrites] = first[: self.overwrites]
        newest[: self.overwrites] = (first[: self.overwrites] + shift) % self.values
        # The pair of each write, a pair that is overwritten twice among them, in any order: the
        # earlier of the two is then its first write.
        order = rng.permutation(np.r_[: self.pairs, : self.overwrites])
        seen: set[int] = set()
        values = []
        for pair in order:
            again = pair in seen or pair >= self.overwrites
            values.append(newest[pair] if again else first[pair])
            seen.add(int(pair))
        asked = rng.permutation(self.pairs)
        return Recall(keys[order], np.array(values), keys[asked], newest[asked], old[asked])
