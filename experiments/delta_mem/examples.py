"""Episodes as tokens: what a history, a question and an answer look like, and batches of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from ml_collections import ConfigDict

from experiments.delta_mem.objective import Batch
from experiments.delta_mem.recall import Recall
from kvjax.data.memory import BENCHMARKS, OFFICIAL, Episode, Question
from kvjax.data.packing import examples
from kvjax.io.tokenizer import Tokenizer
from kvjax.soft.layout import IGNORE
from kvjax.train.loop import Batches

QUESTION = "Question: {}\nAnswer:"
KNOWN: dict[str, Any] = {**BENCHMARKS, **OFFICIAL, Recall.name: Recall}


def benchmark(settings: ConfigDict) -> Any:
    """The benchmark of {name, arguments…}; `ValueError` for an unknown name or argument."""
    arguments = dict(settings)
    name = arguments.pop("name")
    if name not in KNOWN:
        raise ValueError(f"benchmark {name!r} is unknown; choose among {', '.join(KNOWN)}")
    try:
        return KNOWN[name](**arguments)
    except TypeError as error:
        raise ValueError(f"benchmark {name}: {error}") from error


class Writer:
    """Text to ids, without special ones, as every arm and every training example has it."""

    def __init__(self, words: Tokenizer) -> None:
        self.words = words
        self.stops = tuple(dict.fromkeys([*words.eos_ids, self.ids("\n")[-1]]))

    def ids(self, text: str) -> list[int]:
        return self.words.encode(text, add_special_tokens=False)

    def history(self, messages: Sequence[str]) -> tuple[list[int], list[int]]:
        """Ids of all messages, a line each, and the number of the message of each id."""
        ids: list[int] = []
        numbers: list[int] = []
        for number, message in enumerate(messages):
            line = self.ids(f"{message}\n")
            ids += line
            numbers += [number] * len(line)
        return ids, numbers

    def question(self, question: Question) -> list[int]:
        return self.ids(QUESTION.format(question.text))

    def answer(self, question: Question) -> list[int]:
        """Ids of the first right answer, to the end of its line."""
        return self.ids(f" {question.answers[0]}\n")

    def reply(self, row: np.ndarray) -> str:
        """The line that a model wrote: [n] int32, −1 where it had stopped."""
        ends = np.flatnonzero((row < 0) | np.isin(row, self.stops))
        return (
            self.words.decode(row[: ends[0] if ends.size else None].tolist()).split("\n")[0].strip()
        )


class Maker:
    """Training examples of fixed shape from episodes; `sizes` is `config.training`."""

    def __init__(self, writer: Writer, sizes: ConfigDict) -> None:
        self.writer, self.sizes = writer, sizes

    def check(self, episodes: Sequence[Episode]) -> None:
        """`ValueError` where some question or answer of them does not fit."""
        for field, most in self._longest(episodes).items():
            if most > self.sizes[field]:
                raise ValueError(f"config.training.{field}={self.sizes[field]}: the longest takes "
                                 f"{most} tokens; use that or more")  # fmt: skip

    def _longest(self, episodes: Sequence[Episode]) -> dict[str, int]:
        pairs = [self._pair(q) for episode in episodes for q in episode.questions]
        return {"question": max(len(p) + len(a) for p, a in pairs),
                "answer": max(len(a) for _, a in pairs)}  # fmt: skip

    def _pair(self, question: Question) -> tuple[list[int], list[int]]:
        return self.writer.question(question), self.writer.answer(question)

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Batch:
        """One episode, without the axis B: the history's last W tokens, Q of its questions."""
        size, count = self.sizes, len(episode.questions)
        picks = rng.choice(count, size.questions, replace=count < size.questions)
        ids, numbers = (
            _row(values[-size.history :], size.history, fill)
            for values, fill in zip(self.writer.history(episode.messages), (0, -1), strict=True)
        )
        pairs = [self._pair(episode.questions[i]) for i in picks]
        asked = [[*prompt, *answer] for prompt, answer in pairs]
        at = [[len(prompt) - 1 + i for i in range(len(answer))] for prompt, answer in pairs]
        return Batch(
            ids,
            numbers,
            np.stack([_row(row, size.question, 0) for row in asked]),
            np.array([len(row) for row in asked], np.int32),
            np.stack([_row(row, size.answer, 0) for row in at]),
            np.stack([_row(answer, size.answer, IGNORE) for _, answer in pairs]),
        )


def _row(values: Sequence[int], size: int, fill: int) -> np.ndarray:
    row = np.full(size, fill, np.int32)
    row[: len(values)] = values
    return row


def training_episodes(training: ConfigDict, seed: int) -> list[Episode]:
    """`training.episodes` of them, as many of each benchmark; or those of a file."""
    if training.file:
        return read_episodes(Path(training.file))
    each = -(-training.episodes // len(training.benchmarks))
    found = [benchmark(b).episodes(each, 2 * seed + 1) for b in training.benchmarks.values()]
    return [episode for some in zip(*found, strict=True) for episode in some][: training.episodes]


def held_out(settings: ConfigDict, count: int, seed: int) -> list[Episode]:
    """Episodes that no training has seen: of another seed."""
    return benchmark(settings).episodes(count, 2 * seed)


def read_episodes(path: Path) -> list[Episode]:
    """A JSON object a line, {"messages": [text], "questions": [{"text", "answers": [text]}]}.

    Raises:
      ValueError: naming file and line.
    """
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            data = json.loads(line)
            asked = [Question(q["text"], tuple(q["answers"])) for q in data["questions"]]
            found.append(Episode(tuple(data["messages"]), tuple(asked)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    return found


def batches(training: ConfigDict, writer: Writer, seed: int) -> Batches:
    """Endless batches, leaves [micro,B,…]; every episode once an epoch. Their place is kept by
    grain and goes into checkpoints."""
    episodes, maker = training_episodes(training, seed), Maker(writer, training)
    maker.check(episodes)
    rows = examples(episodes, cast(Any, maker), seed)
    return iter(rows.batch(training.rows).batch(training.micro))
