"""Test-time learning (MemoryAgentBench's intent labels, arXiv 2507.05257), made from a seed.

Sentences ask for an action on an object, and every pair of the two has a number of its own, drawn
anew in each episode: nothing that a model knew before helps, and neither word alone decides.
"""

import math
import random
from dataclasses import dataclass
from typing import ClassVar

from kvjax.data.memory import scoring
from kvjax.data.memory.episode import Episode, Question, between, draw
from kvjax.data.memory.words import phrases

ACTIONS = tuple(
    """book buy cancel change check collect compare confirm copy cut delay design extend find fix
    insure lend lock move open order pack print rent repair replace sell send share ship store track
    upgrade wash weigh wrap""".split()
)
OBJECTS = tuple(
    """account alarm bag battery bed bicycle bill boat camera card chair cinema coat computer
    contract desk door flight garage garden invoice jacket kitchen lamp laptop letter license loan
    meeting mirror parcel passport phone photo piano policy printer recipe report roof room shoes
    sofa suitcase table taxi tent ticket tool truck vacation van visa wallet watch""".split()
)
STARTS = phrases(
    """I want to {} my {}|please {} my {}|can you {} my {}|how do I {} my {}|help me {} my {}
    |I need to {} my {}|could someone {} my {}|it is time to {} my {}|let me {} my {}"""
)
ENDS = (
    "",
    " today",
    " at once",
    " before Monday",
    " again",
    " this week",
    " for a friend",
    " now",
)
WORDINGS = tuple(start + end for start in STARTS for end in ENDS)
CLASSES = len(ACTIONS) * len(OBJECTS)


@dataclass(frozen=True)
class Learning:
    """`intents` classes, each shown `shots` times, in random order; `questions` new sentences,
    as many of each class as of any other, give or take one.

    An intent's label is one of the numbers below `labels`; no sentence comes twice. Messages hold
    `per_message` examples of about 15 tokens each. Scored by strict EM.
    """

    intents: int = 8
    shots: int = 2
    questions: int = 8
    labels: int = 100
    per_message: int = 1
    name: ClassVar[str] = "learning"
    kinds: ClassVar[tuple[str, ...]] = ("intent",)

    def __post_init__(self) -> None:
        between("intents", self.intents, 2, CLASSES)
        between("shots", self.shots, 1, len(WORDINGS) - 1)
        most = self.intents * (len(WORDINGS) - self.shots)
        between("questions", self.questions, 1, most)
        between("labels", self.labels, self.intents, 10**6)
        between("per_message", self.per_message, 1, self.intents * self.shots)

    def episodes(self, count: int, seed: int = 0) -> list[Episode]:
        """`count` episodes."""
        return draw(self.name, count, seed, self._episode)

    def score(self, question: Question, reply: str) -> float:
        """EM: the label and nothing else, after "Label:" or in its place."""
        return scoring.exact(question, reply)

    def _episode(self, rng: random.Random) -> Episode:
        intents = _intents(rng, self.intents)
        labels = rng.sample(range(self.labels), self.intents)
        each = math.ceil(self.questions / self.intents)
        shown: list[tuple[str, int]] = []  # a sentence, and the number of its intent
        asked: list[tuple[int, str, int]] = []  # its round comes first: each intent once in each
        for i, intent in enumerate(intents):
            wordings = rng.sample(WORDINGS, self.shots + each)
            sentences = [wording.format(*intent) for wording in wordings]
            shown += [(sentence, i) for sentence in sentences[: self.shots]]
            asked += [(n, sentence, i) for n, sentence in enumerate(sentences[self.shots :])]
        rng.shuffle(shown)
        rng.shuffle(asked)
        asked.sort(key=lambda question: question[0])
        lines = [f"{sentence}\nLabel: {labels[i]}" for sentence, i in shown]
        last = {i: n // self.per_message for n, (_, i) in enumerate(shown)}
        size = self.per_message
        messages = ("\n".join(lines[at : at + size]) for at in range(0, len(lines), size))
        questions = (
            Question(f"{sentence}\nLabel:", (str(labels[i]),), kind="intent", when=last[i])
            for _, sentence, i in asked[: self.questions]
        )
        return Episode(tuple(messages), tuple(questions))


def _intents(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Pairs from as small a square of actions and objects as holds them, so that they share."""
    across = min(math.ceil(math.sqrt(count)), len(ACTIONS))
    actions = rng.sample(ACTIONS, across)
    objects = rng.sample(OBJECTS, math.ceil(count / across))
    return rng.sample([(action, thing) for action in actions for thing in objects], count)
