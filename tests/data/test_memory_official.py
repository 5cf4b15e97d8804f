"""Official files of memory benchmarks: each public format, and what is wrong with a broken one."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvjax.data.memory import OFFICIAL, Locomo, LongMemEval, MemoryAgentBench
from kvjax.data.memory.official import chunks

# A row in each public format, of our own making.

FACTS: dict[str, Any] = {
    "context": "0. Ann lives in Rome. 1. Bob lives in Oslo. 2. Ann lives in Bonn.",
    "questions": ["Where does Ann live?", "Where does Bob live?"],
    "answers": [["Bonn", "Bonn, Germany"], ["Oslo"]],
    "metadata": {"source": "factconsolidation_sh_6k", "qa_pair_ids": ["a", "b"], "demo": None},
}
LABELS: dict[str, Any] = {
    "context": "where is my card?\nlabel: 4\n\nis it late\nLabel: 17\n",
    "questions": ["my card is lost"],
    "answers": [["4"]],
    "metadata": {"source": "icl_banking77_5900shot_balance"},
}
DIALOGUE: dict[str, Any] = {
    "sample_id": "conv-0",
    "conversation": {
        "speaker_a": "Ann",
        "speaker_b": "Bob",
        "session_10_date_time": "10:00 am on 9 June, 2023",
        "session_10": [{"speaker": "Bob", "dia_id": "D10:1", "text": "Bye."}],
        "session_2_date_time": "1:56 pm on 8 May, 2023",
        "session_2": [
            {"speaker": "Ann", "dia_id": "D2:1", "text": "I have a dog."},
            {"speaker": "Bob", "dia_id": "D2:2", "text": "Look!", "blip_caption": "a red boat",
             "img_url": ["x"], "query": "boat"},
        ],
        "session_11_date_time": "1 July, 2023",
    },
    "qa": [
        {"question": "Who has what?", "answer": "dog, boat", "evidence": ["D2:1", "D2:2"],
         "category": 1},
        {"question": "When was the boat shown?", "answer": 2023, "evidence": ["D2:2", "D:9:9"],
         "category": 2},
        {"question": "Does Ann like pets?", "answer": "yes; she has a dog", "evidence": ["D2:1"],
         "category": 3},
        {"question": "What did Bob say?", "answer": "Bye", "evidence": ["D10:1"], "category": "4"},
        {"question": "What cat has Ann?", "adversarial_answer": "red", "evidence": "['D2:1']",
         "category": 5},
    ],
    "event_summary": {},
}  # fmt: skip
HISTORY: dict[str, Any] = {
    "question_id": "q1",
    "question_type": "knowledge-update",
    "question": "Where do I live?",
    "answer": "Rome",
    "question_date": "2023/05/30 (Tue) 10:00",
    "haystack_session_ids": ["s2", "s1"],
    "haystack_dates": ["2023/05/21 (Sun) 02:21", "2023/05/20 (Sat) 02:21"],
    "haystack_sessions": [
        [
            {"role": "user", "content": "I moved to Rome.", "has_answer": True},
            {"role": "assistant", "content": "Nice."},
        ],
        [{"role": "user", "content": "I live in Oslo.", "has_answer": True}],
    ],
    "answer_session_ids": ["s1", "s2"],
}
ENTRIES = {"memory_agent_bench": FACTS, "locomo": DIALOGUE, "longmemeval": HISTORY}


def write(folder: Path, *entries: Any) -> Path:
    path = folder / "data.json"
    path.write_text(json.dumps(entries), "utf-8")
    return path


def test_facts_become_messages_and_questions(tmp_path):
    bench = MemoryAgentBench(write(tmp_path, FACTS), words=9)
    (episode,) = bench.read()
    assert episode.messages == ("0. Ann lives in Rome.", "1. Bob lives in Oslo.",
                                "2. Ann lives in Bonn.")  # fmt: skip
    first, second = episode.questions
    assert first.answers == ("Bonn", "Bonn, Germany")
    assert (first.kind, first.when, second.when) == ("factconsolidation_sh_6k", 2, 1)
    assert bench.score(first, "It is in Bonn.") == 1.0


@pytest.mark.parametrize(
    "source, answer, reply, score",
    [
        ("icl_trec_coarse", ["4"], "label: 4", 1),
        ("icl_trec_coarse", ["4"], "42", 0),
        ("detective_qa", ["A. Ann"], "A. Ann", 1),
        ("detective_qa", ["A. Ann"], "Was it A. Ann?", 0),
        ("eventqa_full", ["She left.", "He"], "he saw: she left.", 1),
        ("eventqa_full", ["She left.", "He"], "she stayed with him", 0),
        ("infbench_sum_eng", ["a long day"], "long night", 1 / 2),
        ("longmemeval_s*", ["4"], "42", 1),
        ("ruler_qa1_197k", "Bonn", "in Bonn", 1),
    ],
)
def test_the_source_decides_the_score(tmp_path, source, answer, reply, score):
    row = FACTS | {"questions": ["?"], "answers": [answer], "metadata": {"source": source}}
    bench = MemoryAgentBench(write(tmp_path, row))
    assert bench.score(bench.read()[0].questions[0], reply) == pytest.approx(score)


def test_sources_are_chosen_and_recommendations_left_out(tmp_path):
    films = LABELS | {"metadata": {"source": "recsys_redial_full"}}
    path = write(tmp_path, FACTS, films, LABELS)
    assert [e.questions[0].kind[:4] for e in MemoryAgentBench(path).read()] == ["fact", "icl_"]
    assert len(MemoryAgentBench(path, sources=("icl",)).read()) == 1
    with pytest.raises(ValueError, match=r"no row of sources \('event',\); it has fact.*, recsys"):
        MemoryAgentBench(path, sources=("event",)).read()
    with pytest.raises(ValueError, match="sources: recsys cannot be scored"):
        MemoryAgentBench(path, sources=("recsys_redial",))
    with pytest.raises(ValueError, match="words: 0"):
        MemoryAgentBench(path, words=0)


def test_json_lines_are_read_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(FACTS) + "\n" + json.dumps(LABELS) + "\n", "utf-8")
    assert len(MemoryAgentBench(path).read()) == 2


@pytest.mark.parametrize(
    "text, words, pieces",
    [
        ("One two. Three four! Five?", 2, ["One two.", "Three four!", "Five?"]),
        ("One two. Three four! Five?", 4, ["One two. Three four!", "Five?"]),
        ("a b c d e. f", 2, ["a b c d e.", "f"]),
        ("no end\nnor here", 2, ["no end", "nor here"]),
        ("is it?\nLabel: 5\n\nis he\nlabel: 6", 4, ["is it?\nLabel: 5", "is he\nlabel: 6"]),
        ("version 3.5 is out", 2, ["version 3.5 is out"]),
        ("  \n ", 2, []),
    ],
)
def test_chunks_are_whole_sentences(text, words, pieces):
    assert chunks(text, words) == pieces


def test_a_dialogue_becomes_turns_with_dates(tmp_path):
    bench = Locomo(write(tmp_path, DIALOGUE))
    (episode,) = bench.read()
    assert episode.messages == (
        "DATE: 1:56 pm on 8 May, 2023\nAnn: I have a dog.",
        "Bob: Look! [shares a picture: a red boat]",
        "DATE: 10:00 am on 9 June, 2023\nBob: Bye.",
    )
    assert [q.kind for q in episode.questions] == list(bench.kinds)
    assert [q.when for q in episode.questions] == [1, 1, 0, 2, 0]
    multi, temporal, opened, single, adversarial = episode.questions
    assert temporal.answers == ("2023",) and temporal.text.endswith("an approximate date.")
    assert bench.score(multi, "a boat") == 0.5
    assert bench.score(opened, "yes") == bench.score(single, "bye!") == 1.0
    assert bench.score(adversarial, "red") == 0.0
    assert bench.score(adversarial, "This is not mentioned.") == 1.0


def test_sessions_come_in_order_of_time(tmp_path):
    bench = LongMemEval(write(tmp_path, HISTORY))
    (episode,) = bench.read()
    assert episode.messages == (
        "DATE: 2023/05/20 (Sat) 02:21\nuser: I live in Oslo.",
        "DATE: 2023/05/21 (Sun) 02:21\nuser: I moved to Rome.",
        "assistant: Nice.",
    )
    (question,) = episode.questions
    assert question.text == "Current date: 2023/05/30 (Tue) 10:00\nWhere do I live?"
    assert (question.kind, question.when, question.answers) == ("knowledge-update", 1, ("Rome",))
    assert bench.score(question, "Rome, once Oslo") == 1.0


def test_abstention_is_told_by_the_id_and_preferences_are_left_out(tmp_path):
    path = write(
        tmp_path,
        HISTORY | {"question_id": "q2_abs", "answer": "You did not say."},
        HISTORY | {"question_type": "single-session-preference", "answer": "A rubric."},
        HISTORY | {"question_type": "multi-session", "answer": 3},
    )
    bench = LongMemEval(path)
    abstains, counts = (episode.questions[0] for episode in bench.read())
    assert abstains.kind == "abstention" and bench.score(abstains, "It is not mentioned.") == 1.0
    assert counts.answers == ("3",)


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_seed_chooses_episodes_in_the_file_s_order(tmp_path, name):
    entries = []
    for i in range(6):
        entry = copy.deepcopy(ENTRIES[name])
        (entry["qa"][0] if name == "locomo" else entry)["question"] = f"Question {i}?"
        entry["questions"] = [f"Question {i}?", "Another?"]
        entries.append(entry)
    bench = OFFICIAL[name](write(tmp_path, *entries))
    every, some = bench.read(), bench.episodes(3, 1)
    assert bench.name == name and some == bench.episodes(3, 1)
    assert bench.episodes(6, 1) == every
    places = [every.index(episode) for episode in some]
    assert places == sorted(set(places))
    assert len({tuple(every.index(e) for e in bench.episodes(3, seed)) for seed in range(9)}) > 1
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"count: {count}; .*data.json has 6 episodes"):
            bench.episodes(count)


FIELDS = {
    "memory_agent_bench": ("context", "questions", "answers", "metadata", "metadata.source"),
    "locomo": ("conversation", "qa", "conversation.session_2_date_time",
               "conversation.session_2.0.text", "conversation.session_2.0.speaker",
               "conversation.session_2.0.dia_id", "qa.0.question", "qa.0.category", "qa.0.answer"),
    "longmemeval": ("question_id", "question_type", "question", "answer", "question_date",
                    "haystack_dates", "haystack_sessions", "haystack_sessions.0.0.role",
                    "haystack_sessions.0.0.content"),
}  # fmt: skip


@pytest.mark.parametrize("name, field", [(n, f) for n, fields in FIELDS.items() for f in fields])
@pytest.mark.parametrize("value", ["absent", None, True])
def test_a_missing_field_and_a_wrong_type_are_named(tmp_path, name, field, value):
    broken = copy.deepcopy(ENTRIES[name])
    *parents, last = field.split(".")
    holder = broken
    for key in parents:
        holder = holder[int(key)] if key.isdigit() else holder[key]
    del holder[last]
    if value != "absent":
        holder[last] = value
    path = write(tmp_path, ENTRIES[name], broken)
    problem = "missing" if value == "absent" else f"must be .* is {type(value).__name__}"
    with pytest.raises(ValueError, match=re.escape(f"{path}[1]: ") + f".*field {last}: {problem}"):
        OFFICIAL[name](path).read()


@pytest.mark.parametrize(
    "name, change, problem",
    [
        ("memory_agent_bench", {"context": " "}, "field context: is empty"),
        ("memory_agent_bench", {"answers": [["a"]]}, "field answers: 1 of them for 2 questions"),
        ("memory_agent_bench", {"answers": [["a"], []]}, "field answers: must be texts or lists"),
        ("memory_agent_bench", {"answers": [["a"], [3]]}, "field answers: must be texts or lists"),
        ("memory_agent_bench", {"questions": ["a", 3]}, "field questions: must be a list of texts"),
        ("locomo", {"conversation": {}}, "field conversation: has no session with turns"),
        ("locomo", {"conversation": {"session_1": "x"}},
         "field conversation: field session_1: must be list, is str"),
        ("locomo", {"qa": ["x"]}, "field qa[0]: must be a JSON object, is str"),
        ("locomo", {"qa": [{"question": "?", "answer": "a", "category": 6}]},
         "field qa[0]: field category: must be 1 to 5, is 6"),
        ("longmemeval", {"haystack_dates": ["x"]}, "field haystack_dates: 1 of them for 2"),
        ("longmemeval", {"haystack_dates": ["x", 2]}, "field haystack_dates: must be a list of te"),
        ("longmemeval", {"haystack_sessions": [[], []]}, "field haystack_sessions: has no turn"),
        ("longmemeval", {"haystack_sessions": [[], "x"]},
         "field haystack_sessions[1]: must be a list, is str"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(tmp_path, name, change, problem):
    path = write(tmp_path, ENTRIES[name] | change)
    with pytest.raises(ValueError, match=re.escape(f"{path}[0]: {problem}")):
        OFFICIAL[name](path).read()


@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.parametrize(
    "data, problem",
    [
        (b"[{", "data.json: cannot be read as JSON"),
        (b"\xff\xfe", "data.json: cannot be read as JSON"),
        (b"{}", "data.json: must be a JSON array"),
        (b"[]", "data.json: must be a JSON array"),
        (b"[3]", r"data.json\[0\]: must be a JSON object, is int"),
        (None, "data.json: no such file"),
    ],
)
def test_a_file_that_is_none_of_them(tmp_path, name, data, problem):
    path = tmp_path / "data.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=problem):
        OFFICIAL[name](path).read()
