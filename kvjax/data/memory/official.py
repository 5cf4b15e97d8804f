"""Official memory benchmarks from a person's own copies of the public files; nothing is downloaded.

`.json` is one array, `.jsonl` (also `.jsonl.gz`) one object a line. What is wrong with a file is
said as "file[entry]: field name: …".
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvjax.data.benchmarks.rows import Row, read_rows
from kvjax.data.memory import scoring
from kvjax.data.memory.episode import Episode, Question

_NOT_SCORED = "recsys"  # Recall@5 over a list of films that is no part of the file


@dataclass(frozen=True)
class MemoryAgentBench:
    """Rows {context, questions, answers, metadata} (arXiv 2507.05257), the data set as JSON.

    A row is an episode; its context is cut at ends of sentences into messages of at most `words`
    words: 384 are about the 512 tokens of the official chunks for documents and facts, 3,072 the
    4,096 of the others. `sources` are the beginnings of the sources wanted, none: all but
    recommendations, whose Recall@5 needs a list of films that is no part of the file.

    `kind` is the row's source, and decides the score: EM for labels ("icl_…") and "detective_qa",
    every element of the answer for "eventqa", word F1 for summaries ("infbench_sum") and SubEM for
    LongMemEval, both of which the official code asks a model about, SubEM for the rest. `when` is
    the last message with an answer in it, or the last message.
    """

    path: str | Path
    words: int = 384
    sources: tuple[str, ...] = ()
    name: ClassVar[str] = "memory_agent_bench"

    def __post_init__(self) -> None:
        if self.words < 1:
            raise ValueError(f"words: {self.words}; a message holds at least 1")
        if any(source.startswith(_NOT_SCORED) for source in self.sources):
            raise ValueError(f"sources: {_NOT_SCORED} cannot be scored here: leave it out")

    def read(self) -> list[Episode]:
        """All rows of `sources`, in order."""
        rows = [(row, self._source(row)) for row in _entries(self.path)]
        wanted = [self._episode(row, source) for row, source in rows if self._wants(source)]
        if not wanted:
            has = ", ".join(sorted({source for _, source in rows}))
            raise ValueError(f"{self.path}: no row of sources {self.sources}; it has {has}")
        return wanted

    def episodes(self, count: int, seed: int = 0) -> list[Episode]:
        """`count` of the rows."""
        return _some(self.read(), count, seed, self.path)

    def score(self, question: Question, reply: str) -> float:
        """By the row's source."""
        kind = question.kind
        if kind.startswith(("icl", "detective")):
            return scoring.exact(question, reply)
        if kind.startswith("eventqa"):
            return float(all(part.lower() in reply.lower() for part in question.answers))
        if kind.startswith("infbench_sum"):
            return scoring.token_f1(question, reply)
        return scoring.sub_em(question, reply)

    def _wants(self, source: str) -> bool:
        return source.startswith(self.sources or "") and not source.startswith(_NOT_SCORED)

    def _source(self, row: Row) -> str:
        metadata = Row(row.get("metadata", kind=dict), f"{row.where}: field metadata")
        return metadata.get("source").lower()

    def _episode(self, row: Row, source: str) -> Episode:
        messages = chunks(row.get("context"), self.words)
        if not messages:
            raise row.error("context", "is empty")
        asked, answers = _texts(row, "questions"), row.get("answers", kind=list)
        if len(asked) != len(answers):
            raise row.error("answers", f"{len(answers)} of them for {len(asked)} questions")
        plain = [scoring.normalise(message) for message in messages]
        questions = []
        for text, given in zip(asked, answers, strict=True):
            golds = tuple(given if isinstance(given, list) else [given])
            if not golds or not all(isinstance(gold, str) for gold in golds):
                raise row.error("answers", f"must be texts or lists of texts, has {given!r}")
            parts = [scoring.normalise(gold) for gold in golds]
            last = len(plain) - 1
            when = max((i for i, m in enumerate(plain) if any(p in m for p in parts)), default=last)
            questions.append(Question(text, golds, kind=source, when=when))
        return Episode(tuple(messages), tuple(questions))


@dataclass(frozen=True)
class Locomo:
    """`locomo10.json` (arXiv 2402.17753): a dialogue is an episode, a turn a message.

    The first turn of a session comes after its date; a picture is its caption. Kinds are the
    categories by name; temporal questions carry the official hint. Published averages leave
    "adversarial" out. Scored by `scoring.locomo`.
    """

    path: str | Path
    name: ClassVar[str] = "locomo"
    kinds: ClassVar[tuple[str, ...]] = ("multi-hop", "temporal", "open", "single", "adversarial")

    def read(self) -> list[Episode]:
        """All dialogues, in order."""
        return [self._episode(row) for row in _entries(self.path)]

    def episodes(self, count: int, seed: int = 0) -> list[Episode]:
        """`count` of the dialogues."""
        return _some(self.read(), count, seed, self.path)

    def score(self, question: Question, reply: str) -> float:
        """LoCoMo's F1, by category."""
        return scoring.locomo(question, reply)

    def _episode(self, row: Row) -> Episode:
        messages: dict[str, str] = {}  # by the turn's id
        for turn, date in self._turns(row):
            text = f"{turn.get('speaker')}: {turn.get('text')}"
            if "blip_caption" in turn.values:
                text += f" [shares a picture: {turn.get('blip_caption')}]"
            messages[turn.get("dia_id")] = f"DATE: {date}\n{text}" if date else text
        if not messages:
            raise row.error("conversation", "has no session with turns")
        places = {name: at for at, name in enumerate(messages)}
        questions = [
            self._question(qa, places)
            for qa in _objects(row.get("qa", kind=list), f"{row.where}: field qa")
        ]
        return Episode(tuple(messages.values()), tuple(questions))

    def _turns(self, row: Row) -> Iterator[tuple[Row, str]]:
        """Every turn, with its session's date where it is the first of it."""
        talk = Row(row.get("conversation", kind=dict), f"{row.where}: field conversation")
        numbers = [int(key[8:]) for key in talk.values if re.fullmatch(r"session_\d+", key)]
        for number in sorted(numbers):
            field = f"session_{number}"
            turns = _objects(talk.get(field, kind=list), f"{talk.where}: field {field}")
            date = talk.get(f"session_{number}_date_time")
            yield from ((turn, "" if i else date) for i, turn in enumerate(turns))

    def _question(self, qa: Row, places: dict[str, int]) -> Question:
        category = str(qa.get("category", kind=(int, str)))
        if category not in tuple("12345"):
            raise qa.error("category", f"must be 1 to 5, is {category}")
        kind, text = self.kinds[int(category) - 1], qa.get("question")
        if kind == "temporal":
            text += " Use DATE of CONVERSATION to answer with an approximate date."
        adversarial = kind == "adversarial"
        answer = (
            scoring.NO_INFORMATION if adversarial else str(qa.get("answer", kind=(str, int, float)))
        )
        # Evidence is a list, or the text of one, and a few of its ids are of no turn.
        named = re.findall(r"D\d+:\d+", str(qa.values.get("evidence", "")))
        known = [places[name] for name in named if name in places]
        return Question(text, (answer,), kind=kind, when=max(known, default=len(places) - 1))


@dataclass(frozen=True)
class LongMemEval:
    """`longmemeval_s.json`, `_m` or `_oracle` (arXiv 2410.10813): a question and its sessions each.

    A turn is a message, the first of a session after its date; sessions are put in order of time.
    Questions of kind "single-session-preference" are left out: their answers are rubrics for a
    judge. The rest is scored by the local rule of `scoring.longmemeval`, so no score compares with
    a published one.
    """

    path: str | Path
    name: ClassVar[str] = "longmemeval"

    def read(self) -> list[Episode]:
        """All questions but preferences, in order."""
        rows = _entries(self.path)
        kept = [row for row in rows if row.get("question_type") != "single-session-preference"]
        return [self._episode(row) for row in kept]

    def episodes(self, count: int, seed: int = 0) -> list[Episode]:
        """`count` of the questions, each with its own sessions."""
        return _some(self.read(), count, seed, self.path)

    def score(self, question: Question, reply: str) -> float:
        """The local rule; there is no judge."""
        return scoring.longmemeval(question, reply)

    def _episode(self, row: Row) -> Episode:
        messages: list[str] = []
        when = None
        for date, turns in self._sessions(row):
            for i, turn in enumerate(turns):
                text = f"{turn.get('role')}: {turn.get('content')}"
                if turn.values.get("has_answer"):
                    when = len(messages)
                messages.append(text if i else f"DATE: {date}\n{text}")
        if not messages:
            raise row.error("haystack_sessions", "has no turn")
        abstains = row.get("question_id").endswith("_abs")
        question = Question(
            f"Current date: {row.get('question_date')}\n{row.get('question')}",
            (str(row.get("answer", kind=(str, int, float))),),
            kind="abstention" if abstains else row.get("question_type"),
            when=len(messages) - 1 if when is None else when,
        )
        return Episode(tuple(messages), (question,))

    def _sessions(self, row: Row) -> list[tuple[str, list[Row]]]:
        """Dates ("2023/05/20 (Sat) 02:21": their order is that of the texts) and their turns."""
        dates = _texts(row, "haystack_dates")
        sessions = row.get("haystack_sessions", kind=list)
        if len(dates) != len(sessions):
            problem = f"{len(dates)} of them for {len(sessions)} sessions"
            raise row.error("haystack_dates", problem)
        where = f"{row.where}: field haystack_sessions"
        turns = [_objects(session, f"{where}[{i}]") for i, session in enumerate(sessions)]
        return sorted(zip(dates, turns, strict=True), key=lambda pair: pair[0])


def chunks(text: str, words: int) -> list[str]:
    """`text` in pieces of whole sentences, at most `words` words each, a longer sentence alone.

    "Label: 5" is not parted from the sentence before it, nor "12." from the one that it numbers.
    """
    sentences = re.findall(r"(?:\d+\.\s+)?.+?(?:(?:(?<=[.!?])\s+|\n+)(?!\s*label:)|\Z)", text,
                           re.DOTALL | re.IGNORECASE)  # fmt: skip
    pieces: list[str] = []
    room = 0
    for sentence in sentences:
        size = len(sentence.split())
        if not pieces or size > room:
            pieces.append("")
            room = words
        pieces[-1] += sentence
        room -= size
    return [piece.strip() for piece in pieces if piece.strip()]


def _entries(path: str | Path) -> list[Row]:
    """The objects of a file, of its array or of its lines; `ValueError` says what is wrong."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; put a copy of the public file there")
    if path.suffix != ".json":
        return read_rows(path)
    try:
        values = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, list) or not values:
        raise ValueError(f"{path}: must be a JSON array with at least one object")
    return [_row(value, f"{path}[{i}]") for i, value in enumerate(values)]


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a JSON object, is {type(value).__name__}")
    return Row(value, where)


def _objects(values: Any, where: str) -> list[Row]:
    """The objects of a list, each a row of its own."""
    if not isinstance(values, list):
        raise ValueError(f"{where}: must be a list, is {type(values).__name__}")
    return [_row(value, f"{where}[{i}]") for i, value in enumerate(values)]


def _texts(row: Row, field: str) -> list[str]:
    values = row.get(field, kind=list)
    if not all(isinstance(value, str) for value in values):
        raise row.error(field, "must be a list of texts")
    return values


def _some(episodes: Sequence[Episode], count: int, seed: int, path: str | Path) -> list[Episode]:
    """`count` of them, drawn by `seed`, in the file's order."""
    if not 1 <= count <= len(episodes):
        raise ValueError(f"count: {count}; {path} has {len(episodes)} episodes: choose 1 to that")
    return [episodes[i] for i in sorted(random.Random(seed).sample(range(len(episodes)), count))]
