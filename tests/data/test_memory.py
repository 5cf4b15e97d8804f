"""Synthetic memory: what is asked stands in the messages, the newest holds, a seed repeats."""

import datetime
import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import numpy as np
import pytest

from kvjax.data.memory import (
    BENCHMARKS,
    MQAR,
    Facts,
    Finding,
    Learning,
    LocomoLike,
    LongMemEvalLike,
    Question,
    facts,
    finding,
    scoring,
    sessions,
    stale,
    timelines,
    words,
)

SEED = 5
NAMES = list(BENCHMARKS)
Messages = Sequence[str]


@functools.cache
def pattern(template: str) -> re.Pattern[str]:
    """A template's sentence, with a group for each gap."""
    return re.compile(re.escape(template).replace(r"\{\}", r"(\w+)"))


# Oracles: they read the messages and know the grammar, and nothing else.


def graph_of(messages: Messages, newest: bool = True) -> dict[tuple[str, str], str]:
    """What each subject's phrase leads to, by the sentences with the largest (or smallest) number.

    A sentence is told apart by its template alone.
    """
    graph: dict[tuple[str, str], str] = {}
    sentences = re.findall(r"(\d+)\. (.+?\.)(?= \d|\n|$)", "\n".join(messages))
    assert [int(number) for number, _ in sentences] == list(range(len(sentences)))
    for _, text in sentences if newest else reversed(sentences):
        for relation in facts.RELATIONS:
            if found := pattern(relation.fact).fullmatch(text):
                graph[found[1], relation.phrase] = found[2]
    return graph


def follow(graph: dict[tuple[str, str], str], phrase: str) -> str | None:
    for relation in facts.RELATIONS:
        start = relation.phrase.removesuffix("{}")
        if phrase.startswith(start):
            name = follow(graph, phrase.removeprefix(start))
            return None if name is None else graph.get((name, relation.phrase))
    return phrase


def read_facts(messages: Messages, question: Question) -> str | None:
    phrase = re.fullmatch(r"Wh(?:o|at) is (.*)\?", question.text)
    assert phrase
    return follow(graph_of(messages), phrase[1])


def read_learning(messages: Messages, question: Question) -> str | None:
    def intent(text: str) -> tuple[str, str]:
        found = re.search(r"(\w+) my (\w+)", text)
        assert found
        return found[1], found[2]

    examples = re.findall(r"(.+)\nLabel: (\d+)", "\n".join(messages))
    assert question.text.removesuffix("\nLabel:") not in [text for text, _ in examples]
    labels = {label for text, label in examples if intent(text) == intent(question.text)}
    assert len(labels) <= 1
    return labels.pop() if labels else None


def read_finding(messages: Messages, question: Question) -> str | None:
    for detail in finding.DETAILS:
        if asked := pattern(detail.asked).fullmatch(question.text):
            told = [pattern(detail.told).search(message) for message in messages]
            values = [found[2] for found in told if found and found[1] == asked[1]]
            assert len(values) <= 1
            return values[0] if values else None
    raise AssertionError(question.text)


def day_of(text: str) -> datetime.date:
    day, month, year = text.split()
    return datetime.date(int(year), timelines.MONTHS.index(month) + 1, int(day))


def turns(messages: Messages) -> Iterator[tuple[datetime.date, str, str]]:
    """Day, speaker, text of each turn."""
    day = None
    for message in messages:
        if found := re.match(r"DATE: (.*)\n", message):
            day, message = day_of(found[1]), message[found.end() :]
        assert day
        speaker, _, text = message.partition(": ")
        yield day, speaker, text


def read_locomo(messages: Messages, question: Question) -> str | None:
    events = []  # speaker, topic, value, day
    for day, speaker, text in turns(messages):
        for topic in (timelines.TRIP, *timelines.TOPICS):
            for end, ago in ((" today", 0), (" yesterday", 1)):
                if found := pattern(topic.told.format("{}", end)).fullmatch(text):
                    events.append((speaker, topic, found[1], day - datetime.timedelta(ago)))
    if found := re.fullmatch(r"Which continent did (\w+) come home from\?", question.text):
        homes = [v for s, t, v, _ in events if s == found[1] and t is timelines.TRIP]
        return words.continent(homes[0]) if homes else None
    for topic in (timelines.TRIP, *timelines.TOPICS):
        own = [(s, v, day) for s, t, v, day in events if t is topic]
        for template in (topic.what, topic.list):
            if found := pattern(template).fullmatch(question.text):
                values = [v for s, v, _ in own if s == found[1]]
                return ", ".join(values) or "No information available"
        if found := pattern(topic.when).fullmatch(question.text):
            days = [day for s, v, day in own if (s, v) == (found[1], found[2])]
            return timelines.day_name(days[0]) if days else None
    raise AssertionError(question.text)


def read_sessions(messages: Messages, question: Question) -> str | None:
    told = list(turns(messages))
    said = [(day, text) for day, speaker, text in told if speaker == "user"]

    def newest(template: str) -> str | None:
        values = [found[1] for _, _, text in told if (found := re.search(template, text))]
        return values[-1] if values else None

    def day(what: str) -> datetime.date | None:
        return next((day for day, text in said if f"I {what} today." in text), None)

    if found := re.fullmatch(r"What did you suggest (.*)\?", question.text):
        return newest(rf"I suggest (\w+) {found[1]}\.")
    if found := re.fullmatch(r"How many (.*) did I say that I added\?", question.text):
        return str(sum(f"I added one to my {found[1]}:" in text for _, text in said))
    if found := re.fullmatch(r"How many days after I (.*) was it that I (.*)\?", question.text):
        first, last = day(found[1]), day(found[2])
        return f"{(last - first).days} days" if first and last else None
    found = re.fullmatch(r"What is my (.*)\?", question.text)
    assert found
    return newest(rf"my {found[1]} is (?:now )?(\w+)\.") or "Not mentioned"


ORACLES: dict[str, Callable[[Messages, Question], str | None]] = {
    "facts": read_facts,
    "learning": read_learning,
    "finding": read_finding,
    "locomo_like": read_locomo,
    "longmemeval_like": read_sessions,
}
NOT_THERE = ("adversarial", "abstention")


@pytest.mark.parametrize("name", NAMES)
def test_whoever_reads_the_messages_knows_every_answer(name):
    benchmark = BENCHMARKS[name]()
    episodes = benchmark.episodes(10, SEED)
    assert len(episodes) == 10
    for episode in episodes:
        assert len(episode.questions) == benchmark.questions
        for question in episode.questions:
            read = ORACLES[name](episode.messages, question)
            assert read is not None
            assert benchmark.score(question, read) == 1.0
            assert benchmark.score(question, question.answers[0]) == 1.0
            assert benchmark.score(question, "") == 0.0
            assert benchmark.score(question, "something else") == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_when_is_the_message_that_completes_the_evidence(name):
    benchmark = BENCHMARKS[name]()
    for episode in benchmark.episodes(10, SEED):
        for question in episode.questions:
            upto = ORACLES[name](episode.messages[: question.when + 1], question)
            assert upto is not None and benchmark.score(question, upto) == 1.0
            before = ORACLES[name](episode.messages[: question.when], question)
            if name != "learning" and question.kind not in NOT_THERE:  # it has earlier shots
                assert before is None or benchmark.score(question, before) < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_an_old_answer_is_never_right(name):
    benchmark = BENCHMARKS[name]()
    asked = [q for e in benchmark.episodes(20, SEED) for q in e.questions]
    olds = [(q, old) for q in asked for old in q.old]
    assert bool(olds) == (name in ("facts", "longmemeval_like"))
    for question, old in olds:
        assert benchmark.score(question, old) == 0.0
        assert stale(question, f"It is {old}.") == 1.0
        assert stale(question, f"Not {old} but {question.answers[0]}.") == 0.0
    assert not any(stale(q, "neither") for q in asked)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_repeats_and_episodes_differ(name):
    benchmark = BENCHMARKS[name]()
    episodes = benchmark.episodes(4, SEED)
    assert episodes == benchmark.episodes(4, SEED)
    assert episodes[:2] == benchmark.episodes(2, SEED)
    everything = [*episodes, *benchmark.episodes(4, SEED + 1)]
    assert len({episode.messages for episode in everything}) == 8


@pytest.mark.parametrize("name", NAMES)
def test_questions_of_every_kind_are_asked_once_each(name):
    benchmark = BENCHMARKS[name]()
    episode = benchmark.episodes(1, SEED)[0]
    assert {q.kind for q in episode.questions} == set(benchmark.kinds)
    assert len({q.text for q in episode.questions}) == len(episode.questions)


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_into_512_tokens_by_default(name):
    """A word or a mark is about a token to SmolLM2, whose own count is within a sixth of it."""
    for episode in BENCHMARKS[name]().episodes(5, SEED):
        assert len(re.findall(r"\w+|[^\w\s]|\n", "\n".join(episode.messages))) <= 512 * 6 / 7


def test_no_word_is_part_of_another():
    lower = [word.lower() for word in words.WORDS]
    assert len(lower) > 300
    assert not [(a, b) for a, b in combinations(lower, 2) if a in b or b in a]


def test_nonces_are_new_words():
    names = words.nonces(random.Random(SEED), 2000)
    assert len(set(names)) == 2000
    assert not [n for n in names for word in words.WORDS if word.lower() in n.lower()]


# Sizes: settings are what they say.


def test_facts_are_told_and_edits_told_again():
    for episode in Facts(facts=12, edits=5, questions=4).episodes(10, SEED):
        newest, first = graph_of(episode.messages), graph_of(episode.messages, newest=False)
        assert len(newest) == 12
        assert sum(newest[edge] != first[edge] for edge in newest) == 5
        assert re.findall(r"(\d+)\. ", episode.messages[-1])[-1] == "16"
        for question in episode.questions:
            asked = question.text.partition(" is ")[2].rstrip("?")
            outdated = follow(first, asked)
            if question.kind == "single":
                changed = outdated != question.answers[0]
                assert question.old == ((outdated,) if changed else ())
            elif outdated not in (None, *question.answers):
                assert outdated in question.old


def test_without_edits_nothing_is_old_and_hops_are_as_many_as_asked():
    for episode in Facts(facts=30, edits=0, questions=6, hops=(3,)).episodes(3, SEED):
        assert all(q.text.count(" of ") == 3 and not q.old for q in episode.questions)


def test_every_fact_that_the_vocabulary_has():
    most = len(facts.EDGES)
    episode = Facts(facts=most, edits=0, questions=1, hops=(1,), per_message=most).episodes(1)[0]
    assert len(episode.messages) == 1
    assert len(graph_of(episode.messages)) == most


def test_one_fact_one_question():
    episode = Facts(facts=1, edits=1, questions=1, hops=(1,)).episodes(1, SEED)[0]
    assert read_facts(episode.messages, episode.questions[0]) == episode.questions[0].answers[0]
    assert len(episode.questions[0].old) == 1


def test_shots_and_intents_are_as_many_as_asked_and_labels_mean_nothing():
    episodes = Learning(intents=6, shots=3, labels=6, per_message=2).episodes(100, SEED)
    for episode in episodes:
        assert len(episode.messages) == 9
        labels = re.findall(r"Label: (\d+)", "\n".join(episode.messages))
        assert sorted(labels) == sorted(3 * [str(label) for label in range(6)])
        assert len({q.answers for q in episode.questions}) == 6
    first = [re.findall(r"Label: (\d+)", e.messages[0])[0] for e in episodes]
    assert set(first) == set("012345")  # whatever an intent is, any label is its


def test_neither_action_nor_object_decides_alone():
    for episode in Learning(intents=4).episodes(5, SEED):
        pairs = set(re.findall(r"(\w+) my (\w+)", "\n".join(episode.messages)))
        assert len(pairs) == 4
        assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == 2


def test_documents_have_their_details_among_filler():
    finder = Finding(documents=3, details=4, filler=2, questions=12)
    for episode in finder.episodes(3, SEED):
        assert len(episode.messages) == 3
        assert all(m.count(". ") == 1 + 4 + 2 for m in episode.messages)
        assert {q.when for q in episode.questions} == {0, 1, 2}


def test_a_timeline_has_its_sessions_and_every_question_there_is():
    benchmark = LocomoLike(sessions=3, turns=6, events=4, questions=20)
    for episode in benchmark.episodes(10, SEED):
        told = list(turns(episode.messages))
        assert len(told) == 18 and len({day for day, _, _ in told}) == 3
        assert len({speaker for _, speaker, _ in told}) == 2
        counts = {k: sum(q.kind == k for q in episode.questions) for k in benchmark.kinds}
        assert counts == {"single": 4, "multi-hop": 2, "temporal": 8, "open": 2, "adversarial": 4}


def test_updates_come_later_and_the_rest_is_unknown():
    benchmark = LongMemEvalLike(facts=5, updates=5, questions=20)
    for episode in benchmark.episodes(10, SEED):
        counts = {k: sum(q.kind == k for q in episode.questions) for k in benchmark.kinds}
        assert counts["knowledge-update"] == 5 and counts["single-session-user"] == 0
        assert counts["abstention"] == len(sessions.ATTRIBUTES) - 5
        assert len(episode.messages) == 36


@pytest.mark.parametrize("events", [3, timelines.MAX_EVENTS])
def test_a_timeline_of_few_and_of_all_events(events):
    benchmark = LocomoLike(sessions=2, turns=2 * events, events=events, questions=6 * events - 4)
    for episode in benchmark.episodes(5, SEED):
        for question in episode.questions:
            assert read_locomo(episode.messages, question) == question.answers[0]


def test_the_smallest_history_that_holds_the_facts():
    benchmark = LongMemEvalLike(sessions=7, turns=2, facts=1, updates=1, questions=6)
    for episode in benchmark.episodes(10, SEED):
        for question in episode.questions:
            read = read_sessions(episode.messages, question)
            assert read is not None and benchmark.score(question, read) == 1.0


# Token-level recall.


def test_mqar_answers_are_the_newest_values_and_old_ones_the_first():
    recall = MQAR(pairs=12, overwrites=5, keys=40, values=7).draw(20, SEED)
    assert recall.keys.shape == recall.values.shape == (20, 17)
    assert recall.queries.shape == recall.answers.shape == recall.old.shape == (20, 12)
    assert all(part.dtype == np.int32 for part in recall)
    assert 0 <= recall.keys.min() and recall.keys.max() < 40
    assert 0 <= recall.values.min() and recall.values.max() < 7
    for keys, values, queries, answers, old in zip(*recall, strict=True):
        assert sorted(queries) == sorted(set(keys))
        first: dict[int, int] = {}
        newest: dict[int, int] = {}
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            first.setdefault(key, value)
            newest[key] = value
        assert answers.tolist() == [newest[k] for k in queries.tolist()]
        changed = [first[k] if first[k] != newest[k] else -1 for k in queries.tolist()]
        assert old.tolist() == changed
        assert (old >= 0).sum() == 5


def test_mqar_repeats_from_its_seed_and_fills_its_keys():
    task = MQAR(pairs=4, keys=4, values=2)
    one, same, other = task.draw(3, 1), task.draw(3, 1), task.draw(3, 2)
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not np.array_equal(one.keys, other.keys)
    assert np.array_equal(np.sort(one.keys), np.tile(np.arange(4), (3, 1)))
    assert (one.old == -1).all()


# What cannot be made is refused by name.

TOO_MANY = len(facts.EDGES) + 1


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: Facts(facts=0), "facts: 0; choose 1 to"),
        (lambda: Facts(facts=TOO_MANY), f"facts: {TOO_MANY}; choose 1 to {TOO_MANY - 1}"),
        (lambda: Facts(facts=4, edits=5), "edits: 5; choose 0 to 4"),
        (lambda: Facts(questions=0), "questions: 0"),
        (lambda: Facts(per_message=0), "per_message: 0"),
        (lambda: Facts(hops=()), "hops: ()"),
        (lambda: Facts(hops=(0,)), "hops: (0,)"),
        (
            lambda: Facts(facts=1, edits=0, questions=1, hops=(2,)).episodes(1),
            "questions: 1 facts have no 1 chains of (2,) hops; raise facts",
        ),
        (lambda: Facts().episodes(0), "count: 0"),
        (lambda: Learning(intents=1), "intents: 1; choose 2 to"),
        (lambda: Learning(intents=10**5), "intents: 100000; choose 2 to"),
        (lambda: Learning(shots=0), "shots: 0"),
        (lambda: Learning(shots=72), "shots: 72; choose 1 to 71"),
        (lambda: Learning(questions=10**4), "questions: 10000; choose 1 to 560"),
        (lambda: Learning(labels=7), "labels: 7; choose 8 to"),
        (lambda: Learning(per_message=17), "per_message: 17; choose 1 to 16"),
        (lambda: Finding(documents=0), "documents: 0"),
        (lambda: Finding(documents=10**6), "documents: 1000000; choose 1 to 2000"),
        (lambda: Finding(details=12), "details: 12; choose 1 to 11"),
        (lambda: Finding(filler=13), "filler: 13; choose 0 to 12"),
        (lambda: Finding(documents=1, details=2), "questions: 8; choose 1 to 2"),
        (lambda: LocomoLike(sessions=1), "sessions: 1; choose 2 to 100"),
        (lambda: LocomoLike(turns=1), "turns: 1"),
        (lambda: LocomoLike(events=8), "events: 8; choose 3 to 7"),
        (lambda: LocomoLike(sessions=2, turns=3), "events: 4; 2 sessions of 3 turns have room for"),
        (lambda: LocomoLike(questions=21), "questions: 21; choose 1 to 20"),
        (lambda: LongMemEvalLike(facts=0), "facts: 0; choose 1 to 15"),
        (lambda: LongMemEvalLike(facts=16), "facts: 16; choose 1 to 15"),
        (lambda: LongMemEvalLike(updates=5), "updates: 5; choose 0 to 4"),
        (lambda: LongMemEvalLike(sessions=2), "facts: 4 with 2 updates take 11 turns of the user"),
        (lambda: LongMemEvalLike(questions=21), "questions: 21; choose 1 to 20"),
        (lambda: MQAR(pairs=0), "pairs: 0"),
        (lambda: MQAR(pairs=257), "pairs: 257; choose 1 to 256"),
        (lambda: MQAR(pairs=4, overwrites=5), "overwrites: 5; choose 0 to 4"),
        (lambda: MQAR(values=1), "values: 1"),
        (lambda: MQAR().draw(0), "batch: 0"),
    ],
)
def test_what_cannot_be_made_is_named(make, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        make()


def test_every_score_is_the_rule_of_its_benchmark():
    long = Question("?", ("4",))
    assert Facts().score(long, "42") == Finding().score(long, "42") == 1.0  # SubEM, as it is
    assert Learning().score(long, "42") == LongMemEvalLike().score(long, "42") == 0.0
    assert LocomoLike().score(Question("?", ("red car",)), "red") == pytest.approx(2 / 3)
    assert scoring.sub_em(long, "42") == 1.0
