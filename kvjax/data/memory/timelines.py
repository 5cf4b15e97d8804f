"""LoCoMo-like (arXiv 2402.17753): what two friends tell each other over months, from a script.

Some turns tell what has happened to the speaker, on the day of the session or the day before; the
rest is talk. Questions are of LoCoMo's five categories.
"""

import datetime
import random
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kvjax.data.memory import scoring, words
from kvjax.data.memory.episode import Episode, Question, between, draw


class Topic(NamedTuple):
    """A kind of event: told by a speaker, asked about ("what", "which of them", "when")."""

    told: str
    what: str
    list: str
    when: str
    values: tuple[str, ...]


TRIP = Topic("I came home from {}{}.", "Which country did {} come home from?",
             "Which countries did {} come home from?", "When did {} come home from {}?",
             words.COUNTRIES)  # fmt: skip
TOPICS = (
    Topic("I adopted a {}{}!", "Which animal did {} adopt?", "Which animals did {} adopt?",
          "When did {} adopt a {}?", words.ANIMALS),
    Topic("I took up {}{}.", "Which sport did {} take up?", "Which sports did {} take up?",
          "When did {} take up {}?", words.SPORTS),
    Topic("I bought a set for the {}{}.", "Which instrument did {} buy a set for?",
          "Which instruments did {} buy a set for?", "When did {} buy a set for the {}?",
          words.INSTRUMENTS),
    Topic("I was hired as a {}{}!", "Which job was {} hired for?", "Which jobs was {} hired for?",
          "When was {} hired as a {}?", words.JOBS),
    Topic("I cooked {} for guests{}.", "What did {} cook for guests?",
          "Which dishes did {} cook for guests?", "When did {} cook {} for guests?", words.FOODS),
    Topic("I painted a room in {}{}.", "Which color did {} paint a room in?",
          "Which colors did {} paint rooms in?", "When did {} paint a room in {}?", words.COLORS),
    Topic("I passed an exam in {}{}.", "Which language did {} pass an exam in?",
          "Which languages did {} pass exams in?", "When did {} pass an exam in {}?",
          words.LANGUAGES),
    Topic("I found a flat in {}{}.", "Which city did {} find a flat in?",
          "Which cities did {} find flats in?", "When did {} find a flat in {}?", words.CITIES),
    Topic("I put a {} on my balcony{}.", "Which plant did {} put on the balcony?",
          "Which plants did {} put on the balcony?", "When did {} put a {} on the balcony?",
          words.PLANTS),
    Topic("I met my cousin {}{}.", "Which cousin did {} meet?", "Which cousins did {} meet?",
          "When did {} meet the cousin {}?", words.PEOPLE),
)  # fmt: skip
DAYS = {" today": 0, " yesterday": 1}  # how a turn says when, and that many days before it
TALK = words.phrases(
    """How have you been?|That sounds great!|I hope you are well.|Tell me more.|I am a bit tired.
    |The weather is lovely.|We should meet soon.|That made me smile.|Nothing new here.
    |I was thinking of you.|Good for you!|Work is busy as ever.|I slept so well.|You are kind.
    |That is a surprise.|I had no idea.|Thanks for asking.|Time flies.|It is late here.
    |I can imagine.|Let us talk soon.|What a week."""
)
MONTHS = tuple(
    """January February March April May June July August September October November
    December""".split()
)
MAX_EVENTS = 2 + len(TOPICS) // 2


class Event(NamedTuple):
    """What `speaker` (0 or 1) tells in message `at`, and the day on which it was."""

    speaker: int
    topic: Topic
    value: str
    at: int
    day: str


@dataclass(frozen=True)
class LocomoLike:
    """`sessions` of `turns` in turn; each of the two speakers tells `events`, spread over them.

    A message is one turn, the first of a session after its date; about 9 tokens each. Of a
    speaker's events one is a trip and two are of one topic; the topics of the two differ, but for
    trips. `questions` go round the kinds: "single", "multi-hop" (all values of one topic, in
    order), "temporal", "open" (a trip's continent, which no turn names), "adversarial" (what only
    the other one has done). Scored by LoCoMo's F1.
    """

    sessions: int = 4
    turns: int = 8
    events: int = 4
    questions: int = 10
    name: ClassVar[str] = "locomo_like"
    kinds: ClassVar[tuple[str, ...]] = ("single", "multi-hop", "temporal", "open", "adversarial")

    def __post_init__(self) -> None:
        between("sessions", self.sessions, 2, 100)
        between("turns", self.turns, 2, 100)
        between("events", self.events, 3, MAX_EVENTS)
        room = self.sessions * (self.turns // 2)
        if room < self.events:
            raise ValueError(f"events: {self.events}; {self.sessions} sessions of {self.turns} "
                             f"turns have room for {room}: raise sessions or turns")  # fmt: skip
        between("questions", self.questions, 1, 6 * self.events - 4)  # as _questions counts

    def episodes(self, count: int, seed: int = 0) -> list[Episode]:
        """`count` episodes."""
        return draw(self.name, count, seed, self._episode)

    def score(self, question: Question, reply: str) -> float:
        """LoCoMo's F1, by the category that `question.kind` is."""
        return scoring.locomo(question, reply)

    def _episode(self, rng: random.Random) -> Episode:
        names = rng.sample(words.PEOPLE, 2)
        dates = [datetime.date(2023, 1, 2) + datetime.timedelta(rng.randrange(300))]
        while len(dates) < self.sessions:
            dates.append(dates[-1] + datetime.timedelta(rng.randint(3, 30)))
        says = {at: rng.choice(TALK) for at in range(self.sessions * self.turns)}
        topics = rng.sample(TOPICS, 2 * (self.events - 2))
        events: list[Event] = []
        for speaker in (0, 1):
            own = topics[speaker::2]
            values = [v for v in words.PEOPLE if v not in names]  # of a cousin
            for topic, at in zip([own[0], own[0], TRIP, *own[1:]], self._turns(rng, speaker),
                                 strict=True):  # fmt: skip
                said = {e.value for e in events}
                pool = values if topic.values is words.PEOPLE else topic.values
                value = rng.choice([v for v in pool if v not in said])
                ago = rng.choice(list(DAYS))
                says[at] = topic.told.format(value, ago)
                day = dates[at // self.turns] - datetime.timedelta(DAYS[ago])
                events.append(Event(speaker, topic, value, at, day_name(day)))
        messages = []
        for at, text in says.items():
            session, turn = divmod(at, self.turns)
            date = "" if turn else f"DATE: {day_name(dates[session])}\n"
            messages.append(f"{date}{names[turn % 2]}: {text}")
        return Episode(tuple(messages), tuple(self._questions(rng, names, events)))

    def _turns(self, rng: random.Random, speaker: int) -> list[int]:
        """`events` turns of a speaker; the first two in different sessions, in order."""
        own = [at for at in range(self.sessions * self.turns) if at % self.turns % 2 == speaker]
        first = rng.choice(own)
        second = rng.choice([at for at in own if at // self.turns != first // self.turns])
        rest = rng.sample([at for at in own if at not in (first, second)], self.events - 2)
        return [*sorted((first, second)), *rest]

    def _questions(
        self, rng: random.Random, names: list[str], events: list[Event]
    ) -> list[Question]:
        """`questions` of them, one of each kind after the other for as long as there are."""
        found: list[Question] = []
        for who, name in enumerate(names):
            first, again, trip, *rest = [e for e in events if e.speaker == who]
            for e in (trip, *rest):
                found.append(_ask(e.topic.what.format(name), e.value, "single", e.at))
            both = f"{first.value}, {again.value}"
            found.append(_ask(first.topic.list.format(name), both, "multi-hop", again.at))
            for e in (first, again, trip, *rest):
                found.append(_ask(e.topic.when.format(name, e.value), e.day, "temporal", e.at))
            where = words.continent(trip.value)
            asked = f"Which continent did {name} come home from?"
            found.append(_ask(asked, where, "open", trip.at))
            theirs = {e.topic: e.at for e in events if e.speaker != who and e.topic is not TRIP}
            for topic, at in theirs.items():
                asked = topic.what.format(name)
                found.append(_ask(asked, scoring.NO_INFORMATION, "adversarial", at))
        return round_robin(rng, found, self.kinds)[: self.questions]


def day_name(day: datetime.date) -> str:
    """ "8 May 2023"."""
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"


def round_robin(
    rng: random.Random, questions: list[Question], kinds: tuple[str, ...]
) -> list[Question]:
    """All of them, shuffled: one of each kind, another of each kind, and so on."""
    shuffled = rng.sample(questions, len(questions))
    by_kind = [[q for q in shuffled if q.kind == kind] for kind in kinds]
    longest = max(map(len, by_kind))
    return [group[i] for i in range(longest) for group in by_kind if i < len(group)]


def _ask(text: str, answer: str, kind: str, when: int) -> Question:
    return Question(text, (answer,), kind=kind, when=when)
