"""Conflicting facts (MemoryAgentBench's FactConsolidation, arXiv 2507.05257), made from a seed.

A random graph of people and places as numbered sentences. Some facts are told again with another
object and, later in the list, a larger number: the newest holds. Questions ask for one edge or for
several, one after the other, all by their newest objects.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kvjax.data.memory import scoring, words
from kvjax.data.memory.episode import Episode, Question, between, draw

RULE = "Facts, each with a number. Where two disagree, the one with the larger number holds."


class Relation(NamedTuple):
    """An edge from a kind of thing to another: how it is told, and the name of its object."""

    subject: str
    object: str
    fact: str
    phrase: str


POOLS: dict[str, tuple[str, ...]] = {
    "person": words.PEOPLE,
    "city": words.CITIES,
    "country": words.COUNTRIES,
    "language": words.LANGUAGES,
    "sport": words.SPORTS,
    "food": words.FOODS,
    "instrument": words.INSTRUMENTS,
    "job": words.JOBS,
    "animal": words.ANIMALS,
    "color": words.COLORS,
}
RELATIONS = (
    Relation("person", "person", "{} is married to {}.", "the spouse of {}"),
    Relation("person", "person", "{} reports to {} at work.", "the boss of {}"),
    Relation("person", "person", "{} goes to school with {}.", "the classmate of {}"),
    Relation("person", "city", "{} lives in {}.", "the home of {}"),
    Relation("person", "sport", "{} is a fan of {}.", "the favorite sport of {}"),
    Relation("person", "food", "{} eats {} every day.", "the daily food of {}"),
    Relation("person", "instrument", "{} plays the {}.", "the instrument of {}"),
    Relation("person", "job", "{} earns a living as a {}.", "the job of {}"),
    Relation("person", "animal", "{} keeps a {} at home.", "the pet of {}"),
    Relation("city", "country", "{} lies in {}.", "the country of {}"),
    Relation("city", "person", "{} has the mayor {}.", "the mayor of {}"),
    Relation("city", "color", "{} has a flag in {}.", "the flag color of {}"),
    Relation("city", "food", "{} is famous for its {}.", "the famous food of {}"),
    Relation("country", "person", "{} is led by {}.", "the leader of {}"),
    Relation("country", "language", "{} teaches {} in its schools.", "the school language of {}"),
    Relation("country", "animal", "{} honors the {} on its coins.", "the coin animal of {}"),
)
Edge = tuple[str, Relation]  # a subject and one of its relations: has one object at a time
Graph = dict[Edge, str]
EDGES = tuple((name, edge) for edge in RELATIONS for name in POOLS[edge.subject])
_TRIES = 50


@dataclass(frozen=True)
class Facts:
    """`facts` edges, `edits` of them told twice; `questions` shared evenly by the lengths `hops`.

    Messages hold `per_message` sentences; about 10 tokens each. As in the official files, the facts
    asked for are edited ones as far as there are any: those questions have `old` answers, which
    follow an outdated edge at some hop. Scored by SubEM; `scoring.stale` gives the old-answer rate.
    """

    facts: int = 20
    edits: int = 8
    questions: int = 8
    hops: tuple[int, ...] = (1, 2)
    per_message: int = 4
    name: ClassVar[str] = "facts"
    kinds: ClassVar[tuple[str, ...]] = ("single", "multi-hop")

    def __post_init__(self) -> None:
        between("facts", self.facts, 1, len(EDGES))
        between("edits", self.edits, 0, self.facts)
        between("questions", self.questions, 1, 10 * self.facts)
        between("per_message", self.per_message, 1, 2 * len(EDGES))
        if not self.hops or not all(1 <= hop <= 4 for hop in self.hops):
            raise ValueError(f"hops: {self.hops}; give at least one length, each from 1 to 4")

    def episodes(self, count: int, seed: int = 0) -> list[Episode]:
        """`count` episodes; `ValueError` where such graphs hold fewer questions than asked for."""
        return draw(self.name, count, seed, self._episode)

    def score(self, question: Question, reply: str) -> float:
        """SubEM."""
        return scoring.sub_em(question, reply)

    def _episode(self, rng: random.Random) -> Episode:
        for _ in range(_TRIES):
            world = World.draw(rng, self.facts, self.edits)
            chains = [chain for hop in self._lengths() for chain in world.pick(rng, *hop)]
            if len(chains) == self.questions:
                break
        else:
            raise ValueError(
                f"questions: {self.facts} facts have no {self.questions} chains of {self.hops} "
                "hops; raise facts, or lower questions or hops"
            )
        lines = [f"{i}. {relation.fact.format(name, to)}"
                 for i, ((name, relation), to) in enumerate(world.told)]  # fmt: skip
        size = self.per_message
        messages = [" ".join(lines[at : at + size]) for at in range(0, len(lines), size)]
        messages[0] = f"{RULE}\n{messages[0]}"
        return Episode(tuple(messages), tuple(world.ask(chain, size) for chain in chains))

    def _lengths(self) -> Iterator[tuple[int, int]]:
        """Each of `hops` with its number of questions."""
        for i, hop in enumerate(self.hops):
            yield hop, len(range(i, self.questions, len(self.hops)))


class World(NamedTuple):
    """All sentences in order; what an edge leads to now, and what it led to before its edit."""

    told: list[tuple[Edge, str]]
    newest: Graph
    before: Graph

    @classmethod
    def draw(cls, rng: random.Random, facts: int, edits: int) -> "World":
        """A graph that grows from what it has, so that its edges meet."""
        first = _grow(rng, facts)
        told = rng.sample(list(first.items()), facts)
        newest, before = dict(first), dict[Edge, str]()
        for edge in rng.sample(list(first), edits):
            before[edge] = first[edge]
            newest[edge] = _object(rng, edge, {name for name, _ in first}, first[edge])
            after = told.index((edge, first[edge])) + 1
            told.insert(rng.randint(after, len(told)), (edge, newest[edge]))
        return cls(told, newest, before)

    def pick(self, rng: random.Random, hops: int, count: int) -> list[tuple[Edge, ...]]:
        """At most `count` chains of `hops` edges, drawn first from those that edits changed."""
        chains = [chain for edge in self.newest for chain in self._chains((edge,), hops)]
        rng.shuffle(chains)
        return sorted(chains, key=lambda chain: not self._outdated(chain))[:count]

    def ask(self, chain: tuple[Edge, ...], per_message: int) -> Question:
        """The question that a chain answers."""
        phrase = chain[0][0]
        for _, relation in chain:
            phrase = relation.phrase.format(phrase)
        last = max(self.told.index((edge, self.newest[edge])) for edge in chain)
        word = "Who" if chain[-1][1].object == "person" else "What"
        return Question(
            f"{word} is {phrase}?",
            (self.newest[chain[-1]],),
            tuple(sorted(self._outdated(chain))),
            "single" if len(chain) == 1 else "multi-hop",
            last // per_message,
        )

    def _chains(self, start: tuple[Edge, ...], hops: int) -> Iterator[tuple[Edge, ...]]:
        """Chains of `hops` edges that go on from `start` and come back to nothing."""
        end = self.newest[start[-1]]
        been = {name for name, _ in start}
        if end in been:
            return
        if len(start) == hops:
            yield start
            return
        for edge in self.newest:
            if edge[0] == end:
                yield from self._chains((*start, edge), hops)

    def _outdated(self, chain: tuple[Edge, ...]) -> set[str]:
        """Where the chain's relations lead by way of an old object, its answer left out."""
        ends = {chain[0][0]}
        for _, relation in chain:
            ends = set(self._either((name, relation) for name in ends))
        return ends - {self.newest[chain[-1]]}

    def _either(self, edges: Iterable[Edge]) -> Iterator[str]:
        """The newest and the old objects of `edges`, of those that were told."""
        for edge in edges:
            yield from (graph[edge] for graph in (self.newest, self.before) if edge in graph)


def _grow(rng: random.Random, facts: int) -> Graph:
    """`facts` edges; two in three begin at something that was named before."""
    free = rng.sample(EDGES, len(EDGES))
    graph: Graph = {}
    known: set[str] = set()
    while len(graph) < facts:
        near = rng.random() < 2 / 3
        edge = next((e for e in free if e[0] in known), free[0]) if near else free[0]
        free.remove(edge)
        graph[edge] = _object(rng, edge, known)
        known |= {edge[0], graph[edge]}
    return graph


def _object(rng: random.Random, edge: Edge, known: set[str], not_this: str = "") -> str:
    """Something for an edge to lead to, every other time something known."""
    pool = [name for name in POOLS[edge[1].object] if name not in (edge[0], not_this)]
    familiar = [name for name in pool if name in known]
    return rng.choice(familiar if familiar and rng.random() < 1 / 2 else pool)
