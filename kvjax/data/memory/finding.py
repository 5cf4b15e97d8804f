"""Accurate retrieval (MemoryAgentBench's AR, arXiv 2507.05257), made from a seed.

Short documents about things with names that mean nothing, so that no model knows them; a question
asks for one detail of one, among others of just that kind.
"""

import random
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kvjax.data.memory import scoring, words
from kvjax.data.memory.episode import Episode, Question, between, draw


class Detail(NamedTuple):
    """How a detail is told of a thing, how it is asked for, and what it may be."""

    told: str
    asked: str
    values: tuple[str, ...]


DETAILS = (
    Detail("{} was founded by {}.", "Who founded {}?", words.PEOPLE),
    Detail("The ruler of {} is {}.", "Who is the ruler of {}?", words.PEOPLE),
    Detail("Ships sail from {} to {}.", "Where do ships sail to from {}?", words.CITIES),
    Detail("{} trades with {}.", "Which country does {} trade with?", words.COUNTRIES),
    Detail("People in {} speak {}.", "Which language do people in {} speak?", words.LANGUAGES),
    Detail("The common sport in {} is {}.", "What is the common sport in {}?", words.SPORTS),
    Detail("The best food in {} is {}.", "What is the best food in {}?", words.FOODS),
    Detail("The guests in {} hear the {}.", "What do the guests in {} hear?", words.INSTRUMENTS),
    Detail("The symbol of {} is the {}.", "What is the symbol of {}?", words.ANIMALS),
    Detail("The walls of {} are {}.", "What color are the walls of {}?", words.COLORS),
    Detail("The main plant in {} is the {}.", "What is the main plant in {}?",
           words.PLANTS),
)  # fmt: skip
FILLER = words.phrases(
    """It rains there in spring.|The roads are good.|Few maps show it.|It has two gates.
    |Its market opens at dawn.|The river is wide there.|It was rebuilt after a fire.
    |Travelers like to rest there.|The nights are quiet.|It stands on a low hill.
    |Its old bridge is narrow.|The winters are mild."""
)
MAX_DOCUMENTS = 2000


@dataclass(frozen=True)
class Finding:
    """`documents` with `details` each and `filler` sentences that say nothing; `questions` asked.

    A message is one document, about 10 tokens a sentence. Questions are about different details,
    of documents anywhere. Scored by SubEM.
    """

    documents: int = 10
    details: int = 2
    filler: int = 1
    questions: int = 8
    name: ClassVar[str] = "finding"
    kinds: ClassVar[tuple[str, ...]] = ("needle",)

    def __post_init__(self) -> None:
        between("documents", self.documents, 1, MAX_DOCUMENTS)
        between("details", self.details, 1, len(DETAILS))
        between("filler", self.filler, 0, len(FILLER))
        between("questions", self.questions, 1, self.documents * self.details)

    def episodes(self, count: int, seed: int = 0) -> list[Episode]:
        """`count` episodes."""
        return draw(self.name, count, seed, self._episode)

    def score(self, question: Question, reply: str) -> float:
        """SubEM."""
        return scoring.sub_em(question, reply)

    def _episode(self, rng: random.Random) -> Episode:
        messages, questions = [], []
        for i, name in enumerate(words.nonces(rng, self.documents)):
            sentences = rng.sample(FILLER, self.filler)
            for detail in rng.sample(DETAILS, self.details):
                value = rng.choice(detail.values)
                sentences.append(detail.told.format(name, value))
                asked = detail.asked.format(name)
                questions.append(Question(asked, (value,), kind="needle", when=i))
            rng.shuffle(sentences)
            messages.append(f"Document {i + 1}. {name}. " + " ".join(sentences))
        return Episode(tuple(messages), tuple(rng.sample(questions, self.questions)))
