"""EXPAND: what a reply means, when the loop stops, and that examples are made of the same words."""

import numpy as np
import pytest

import kvjax
from kvjax.soft import Region, Text, encode_context, lay_out
from kvjax.soft.expand import Chunk, Directives, Reply, ToolCalls, ask, example, numbers
from kvjax.soft.reader import Marks, sessions, split, training_parts
from tests.soft.words import Characters

CHUNKS = [f"text of chunk {i}" for i in range(1, 13)]
FORMS = [Directives(), ToolCalls()]


def script(*replies):
    """Sessions that give these replies in turn, and what was said to each session."""
    left, heard = list(replies), []

    def open_session():
        said = []
        heard.append(said)

        def say(pieces):
            said.append("".join(p if isinstance(p, str) else f"<{p.number}>" for p in pieces))
            return left.pop(0)

        return say

    return open_session, heard


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("EXPAND: 3,7", Reply((3, 7), None)),
        ("thinking\n  EXPAND : 3, 3 and 12 \n", Reply((3, 12), None)),
        ("EXPAND: 1\nANSWER: 42", Reply((), "42")),
        ("ANSWER: 42\nEXPAND: 2", Reply((2,), None)),
        ("ANSWER: ", Reply((), "")),
        ("I would EXPAND: 3", Reply((), None)),
        ("", Reply((), None)),
        ("EXPAND: 99999999999999999999", Reply((), None)),
    ],
)
def test_the_last_directive_wins(text, wanted):
    assert Directives().parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (ToolCalls().reply(Reply((3, 7), None)), Reply((3, 7), None)),
        (" blue ", Reply((), "blue")),
        ("<tool_call>{</tool_call>", Reply((), None)),
        ('<tool_call>{"name": "other", "arguments": {"segment_id": "seg_1"}}</tool_call>',
         Reply((), None)),
        ('<tool_call>{"name": "expand", "arguments": {"segment_id": 3}}</tool_call>',
         Reply((), None)),
        ("<tool_call>" + "[" * 9999 + "</tool_call>", Reply((), None)),
    ],
)  # fmt: skip
def test_tool_calls_are_read(text, wanted):
    assert ToolCalls().parse(text) == wanted


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reply", [Reply((2, 5), None), Reply((), "blue")])
def test_a_form_reads_what_it_writes(form, reply):
    assert form.parse(form.reply(reply)) == reply


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", [True, False])
def test_expanding_then_answering(form, keep):
    sure = [form.reply(Reply((3, 7), None)), form.reply(Reply((7, 1), None)),
            form.reply(Reply((), "blue"))]  # fmt: skip
    opening, heard = script(*sure)
    found = ask(opening, form, CHUNKS, "colour?", keep=keep)
    assert found.expanded == [3, 7, 1] and found.answer == "blue" and found.replies == sure
    assert len(heard) == (1 if keep else 3)
    turns = [turn for said in heard for turn in said]
    assert CHUNKS[2] in turns[1] and "<3>" in turns[0] and CHUNKS[2] not in turns[0]
    # Kept, a turn brings only what is new; rebuilt, a prompt holds all that is expanded so far.
    assert (CHUNKS[2] in turns[2], "<3>" in turns[2]) == (not keep, not keep)
    assert CHUNKS[0] in turns[2]


def test_the_first_turn_must_expand():
    for first, wanted in (("ANSWER: 9 of 4, not 77", [9, 4]), ("ANSWER: no idea", [1]),
                          ("1 2 3 4 5 6", [1, 2, 3, 4, 5]), ("EXPAND: 40", [1])):  # fmt: skip
        opening, _ = script(first, "ANSWER: x")
        assert ask(opening, Directives(), CHUNKS, "?").expanded == wanted
    opening, _ = script("ANSWER: x")
    found = ask(opening, Directives(), CHUNKS, "?", must_expand=False)
    assert (found.answer, found.expanded) == ("x", [])


def test_a_reply_that_names_nothing_new_makes_the_next_turn_the_last():
    opening, heard = script("EXPAND: 2", "EXPAND: 2", "it is blue")
    found = ask(opening, Directives(), CHUNKS, "?")
    assert found.answer == "it is blue" and found.expanded == [2]
    assert Directives().due in heard[2][0] and Directives().due not in heard[1][0]


def test_the_rounds_end():
    opening, heard = script(*[f"EXPAND: {i}" for i in range(1, 9)])
    found = ask(opening, Directives(), CHUNKS, "?", rounds=3)
    assert found.expanded == [1, 2, 3] and found.answer == "" and len(heard) == 4


def test_what_cannot_be_asked():
    with pytest.raises(ValueError, match="at least one of each"):
        ask(script()[0], Directives(), [], "?")
    with pytest.raises(ValueError, match="there are chunks 1 … 12"):
        example(Directives(), CHUNKS, "?", [13], "x")
    with pytest.raises(ValueError, match="size is 2"):
        split("text", Characters(), 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", [True, False])
def test_examples_hold_what_the_loop_says(form, keep):
    made = example(form, CHUNKS, "colour?", [3, 7], "blue", keep=keep)
    replies = ["".join(t.pieces) for turns in made for t in turns if t.trained]
    opening, heard = script(*replies)
    found = ask(opening, form, CHUNKS, "colour?", keep=keep)
    assert found.answer == "blue" and found.expanded == [3, 7]
    said = ["".join(p if isinstance(p, str) else f"<{p.number}>" for p in t.pieces)
            for turns in made for t in turns if not t.trained]  # fmt: skip
    assert said == [turn for session in heard for turn in session]


def test_only_replies_are_trained_on(plain):
    words, marks = Characters(), Marks("[", "]", "!")
    turns = example(Directives(), ["ab", "cde"], "?", [2], "w", keep=True)[0]
    parts = training_parts(turns, ["ab", "cde"], words, words, marks)
    assert [p for p in parts if isinstance(p, Region)] == [
        Region(words.encode("ab")), Region(words.encode("cde"))
    ]  # fmt: skip
    row = lay_out(parts, plain.config)
    assert words.decode(row.labels) == "EXPAND: 2!ANSWER: w!"
    everything = words.decode(np.where(row.slot < 0, row.tokens, 0))
    assert everything.startswith("[Chunk 1: ") and "]EXPAND: 2![Passage 2: cde" in everything
    assert all(isinstance(part, Text | Region) for part in parts)


def test_chunks_join_to_the_text():
    text = "abcdefghij" * 5
    chunks = split(text, Characters(), 8)
    assert "".join(chunks) == text and max(map(len, chunks)) == 8
    assert split("", Characters()) == []


def test_a_character_of_several_tokens_stays_whole():
    class Bytes:
        def encode(self, text, add_special_tokens=True):
            return list(text.encode())

        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    text = "a" * 7 + "é€" * 20
    assert "".join(split(text, Bytes(), 8)) == text


@pytest.mark.parametrize("keep", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_is_asked(plain, keep):
    """An untrained model replies nonsense: the loop expands chunk 1 for it, and its next reply is
    what the decoder continues the whole conversation with."""
    words = Characters()
    chunks = ["abc" * 9, "uvw"]
    context = encode_context(plain, [words.encode(c) for c in chunks], windows_per_pass=2)
    heard = []
    opening = sessions(plain, context, words, capacity=256, max_new_tokens=4, stop=[1],
                       transform=kvjax.cache(), marks=Marks("", "", "!"))  # fmt: skip

    def listening():
        say = opening()

        def both(pieces):
            reply = say(pieces)
            heard.append((list(pieces), reply))
            return reply

        return both

    found = ask(listening, Directives(rules="?", due="!"), chunks, "q", keep=keep, rounds=1)
    assert found.expanded == [1] and len(found.replies) == 2
    fed = []
    for pieces, reply in heard if keep else heard[-1:]:
        fed += [context[p.number - 1] if isinstance(p, Chunk) else words.encode(p) for p in pieces]
        if pieces is not heard[-1][0]:
            fed.append(words.encode(reply + "!"))
    whole = kvjax.soft.prompt(plain, fed)
    again = kvjax.generate(plain.decoder, whole, max_new_tokens=4, stop=[1])[0]
    assert words.decode([i for i in again if i != 1]) == found.replies[-1]


def test_numbers_are_short_and_counted_once():
    assert numbers("3, 3,12 and 0005") == (3, 12, 5)
    assert numbers("1" * 10_000) == ()
