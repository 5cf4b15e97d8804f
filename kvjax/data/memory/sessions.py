"""LongMemEval-like (arXiv 2410.10813): what a user told an assistant in some of many sessions."""

import datetime
import random
from dataclasses import dataclass
from typing import ClassVar

from kvjax.data.memory import scoring, words
from kvjax.data.memory.episode import Episode, Question, between, draw
from kvjax.data.memory.timelines import day_name, round_robin

# What a user has one of at a time: told "My … is …", asked "What is my …?".
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "dentist's name": words.PEOPLE,
    "neighbor's name": words.PEOPLE,
    "manager's name": words.PEOPLE,
    "home town": words.CITIES,
    "office location": words.CITIES,
    "next travel destination": words.COUNTRIES,
    "favorite sport": words.SPORTS,
    "favorite dish": words.FOODS,
    "lunch of the week": words.FOODS,
    "current instrument": words.INSTRUMENTS,
    "current language course": words.LANGUAGES,
    "sister's profession": words.JOBS,
    "favorite animal": words.ANIMALS,
    "front door's color": words.COLORS,
    "car's color": words.COLORS,
    "favorite plant": words.PLANTS,
}
# What an assistant suggested: the words for it in a turn and in a question.
SUGGESTIONS: dict[str, tuple[str, ...]] = {
    "for a birthday dinner": words.FOODS,
    "as a weekend sport": words.SPORTS,
    "for the school concert": words.INSTRUMENTS,
    "for the balcony": words.PLANTS,
    "for a honeymoon": words.COUNTRIES,
    "for the kitchen walls": words.COLORS,
}
EVENTS = words.phrases(
    """visited the dentist|sold the car|moved house|ran a marathon|joined a choir|finished the book
    |repaired the roof|planted a hedge|met the new neighbors|started the diet"""
)
# What a user bought several of: the plural, and what each was.
PURCHASES: dict[str, tuple[str, ...]] = {
    "plants": words.PLANTS,
    "instruments": words.INSTRUMENTS,
    "toy animals": words.ANIMALS,
}
USER_TALK = words.phrases(
    """How do I boil an egg?|Explain gravity to me.|Write a short poem.|What rhymes with day?
    |How far is the moon?|Is tea better than coffee?|Help me with an email.|Tell me a joke.
    |How do magnets work?|What is a prime number?|Give me a riddle.|Why is the sky dark?
    |How long is a mile?|Define entropy."""
)
ASSISTANT_TALK = words.phrases(
    """Of course.|Here is a start.|That depends.|Let me explain.|Good question.|Happy to help.
    |It is simple.|Sure, one moment.|Yes, in most cases.|Here you go.|Noted.|I see.
    |Thank you."""
)
STARTS = ("By the way,", "Just so you know,", "Please note:", "Also,")
SUGGESTED, BOUGHT = 2, 3  # turns of an assistant; the most of a user
_KINDS = (
    "single-session-user",
    "single-session-assistant",
    "multi-session",
    "temporal-reasoning",
    "knowledge-update",
    "abstention",
)


@dataclass(frozen=True)
class LongMemEvalLike:
    """`sessions` of `turns`, user and assistant in turn, with facts among talk.

    A user tells `facts` of himself, changes `updates` of them later, tells of two events and of two
    or three purchases; an assistant makes two suggestions. A message is one turn, the first of a
    session after its date; about 9 tokens each. `questions` go round LongMemEval's kinds, without
    preferences (they need a judge): "knowledge-update" has the `old` answer, "abstention" asks for
    what was not told. Scored by the local rule of `scoring.longmemeval`: there is no judge.
    """

    sessions: int = 6
    turns: int = 6
    facts: int = 4
    updates: int = 2
    questions: int = 10
    name: ClassVar[str] = "longmemeval_like"
    kinds: ClassVar[tuple[str, ...]] = _KINDS

    def __post_init__(self) -> None:
        between("sessions", self.sessions, 2, 100)
        between("turns", self.turns, 2, 100)
        between("facts", self.facts, 1, len(ATTRIBUTES) - 1)  # one to abstain on
        between("updates", self.updates, 0, self.facts)
        need, room = self.facts + self.updates + 2 + BOUGHT, self.sessions * (self.turns // 2)
        if room < need:
            raise ValueError(
                f"facts: {self.facts} with {self.updates} updates take {need} turns of the user, "
                f"{self.sessions} sessions of {self.turns} turns have {room}: raise sessions or "
                "turns, or lower facts"
            )
        between("questions", self.questions, 1, len(ATTRIBUTES) + SUGGESTED + 2)

    def episodes(self, count: int, seed: int = 0) -> list[Episode]:
        """`count` episodes."""
        return draw(self.name, count, seed, self._episode)

    def score(self, question: Question, reply: str) -> float:
        """The local rule: an answer's words in the reply, or a reply that it is not known."""
        return scoring.longmemeval(question, reply)

    def _episode(self, rng: random.Random) -> Episode:
        return _Script(self, rng).episode()


class _Script:
    """One episode in the making: `says` fills up, then every question finds its turn in it."""

    def __init__(self, size: LongMemEvalLike, rng: random.Random) -> None:
        self.size, self.rng = size, rng
        self.dates = [datetime.date(2023, 1, 2) + datetime.timedelta(rng.randrange(300))]
        while len(self.dates) < size.sessions:
            self.dates.append(self.dates[-1] + datetime.timedelta(rng.randint(1, 12)))
        turns = range(size.sessions * size.turns)
        talk = (USER_TALK, ASSISTANT_TALK)
        self.says = {at: rng.choice(talk[at % size.turns % 2]) for at in turns}
        self.free = ([at for at in turns if at % size.turns % 2 == 0],
                     [at for at in turns if at % size.turns % 2 == 1])  # fmt: skip
        self.found: list[Question] = []

    def episode(self) -> Episode:
        """Events come first: they need sessions of their own."""
        self._events()
        self._facts()
        self._purchases()
        self._suggestions()
        messages = []
        for at, text in self.says.items():
            session, turn = divmod(at, self.size.turns)
            date = "" if turn else f"DATE: {day_name(self.dates[session])}\n"
            messages.append(f"{date}{'assistant' if turn % 2 else 'user'}: {text}")
        questions = round_robin(self.rng, self.found, _KINDS)[: self.size.questions]
        return Episode(tuple(messages), tuple(questions))

    def _put(self, text: str, at: int) -> int:
        """`text` in turn `at`, which is then taken."""
        side = at % self.size.turns % 2
        self.free[side].remove(at)
        self.says[at] = text
        return at

    def _pick(self, side: int, count: int) -> list[int]:
        """Free turns of the user (0) or the assistant (1), in order."""
        return sorted(self.rng.sample(self.free[side], count))

    def _ask(self, text: str, answer: str, kind: str, when: int, *old: str) -> None:
        self.found.append(Question(text, (answer,), old, kind, when))

    def _tell(self, text: str) -> str:
        return f"{self.rng.choice(STARTS)} {text}"

    def _events(self) -> None:
        one, two = self.rng.sample(EVENTS, 2)
        days = sorted(self.rng.sample(range(self.size.sessions), 2))
        first, last = (self.rng.choice([at for at in self.free[0] if at // self.size.turns == day])
                       for day in days)  # fmt: skip
        self._put(self._tell(f"I {one} today."), first)
        self._put(self._tell(f"I {two} today."), last)
        passed = (self.dates[days[1]] - self.dates[days[0]]).days
        asked = f"How many days after I {one} was it that I {two}?"
        self._ask(asked, f"{passed} day{'s' * (passed > 1)}", "temporal-reasoning", last)

    def _facts(self) -> None:
        named = self.rng.sample(list(ATTRIBUTES), len(ATTRIBUTES))
        told, unknown = named[: self.size.facts], named[self.size.facts :]
        for i, name in enumerate(told):
            value, newer = self.rng.sample(ATTRIBUTES[name], 2)
            updated = i < self.size.updates
            first, *later = self._pick(0, 1 + updated)
            self._put(self._tell(f"my {name} is {value}."), first)
            asked = f"What is my {name}?"
            if updated:
                at = self._put(self._tell(f"my {name} is now {newer}."), later[0])
                self._ask(asked, newer, "knowledge-update", at, value)
            else:
                self._ask(asked, value, "single-session-user", first)
        end = len(self.says) - 1
        for name in unknown:
            self._ask(f"What is my {name}?", scoring.NOT_MENTIONED, "abstention", end)

    def _purchases(self) -> None:
        things = self.rng.choice(list(PURCHASES))
        count = self.rng.randint(2, BOUGHT)
        turns = self._pick(0, count)
        for value, at in zip(self.rng.sample(PURCHASES[things], count), turns, strict=True):
            self._put(self._tell(f"I added one to my {things}: {value}."), at)
        asked = f"How many {things} did I say that I added?"
        self._ask(asked, str(count), "multi-session", turns[-1])

    def _suggestions(self) -> None:
        for purpose in self.rng.sample(list(SUGGESTIONS), SUGGESTED):
            value = self.rng.choice(SUGGESTIONS[purpose])
            at = self._put(f"I suggest {value} {purpose}.", self._pick(1, 1)[0])
            self._ask(f"What did you suggest {purpose}?", value, "single-session-assistant", at)
