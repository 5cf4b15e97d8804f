"""Retrieval prompts: they fit, hold the fact once where they say, and repeat from a seed."""

import re

import pytest

from kvjax.data import Text, retrieval
from kvjax.data.retrieval import DEPTHS, MAX_KEYS, Lines, Needles, Passkey

SENTENCES = " ".join(f"Sentence number {'x' * (i % 7)} of the hay is here." for i in range(400))


class Words:
    """A token is a word, a mark or a line's end: enough of a tokenizer to count."""

    def encode(self, text: str) -> list[int]:
        return [0] * len(re.findall(r"\w+|[^\w ]", text))


TOKENIZER = Words()


@pytest.fixture(autouse=True)
def haystack(monkeypatch):
    monkeypatch.setattr(retrieval, "load_text", lambda name: Text(name, name, SENTENCES, "mine"))


def length(text: str) -> int:
    return len(TOKENIZER.encode(text))


TASKS = [Lines, Passkey, lambda tokens, **more: Needles(tokens, ("a/b",), **more)]


@pytest.mark.parametrize("make", TASKS)
@pytest.mark.parametrize("style", ["completion", "chat"])
@pytest.mark.parametrize("tokens", [300, 1000])
def test_prompts_fill_the_budget_and_repeat_from_their_seed(make, style, tokens):
    task = make(tokens, style=style)
    examples = task.examples(TOKENIZER, 3, seed=7)
    assert all(0.9 * tokens < length(e.prompt) <= tokens for e in examples)
    assert examples == task.examples(TOKENIZER, 3, seed=7)
    assert len({e.prompt for e in examples}) == len(examples)
    assert not {e.answer for e in examples} & {
        e.answer for e in task.examples(TOKENIZER, 3, seed=8)
    }


@pytest.mark.parametrize("make", TASKS)
def test_a_right_text_scores_one_and_a_wrong_one_zero(make):
    for style in ("completion", "chat"):
        task = make(500, style=style)
        example = task.examples(TOKENIZER, 1)[0]
        right = example.target if style == "completion" else f"It is {example.answer}."
        assert task.score(right, example) == {"accuracy": 1.0}
        for wrong in ("", "no number", "1", example.answer + "0", example.answer[:-1]):
            assert task.score(wrong, example) == {"accuracy": 0.0}


def test_only_the_answer_s_own_place_in_the_text_counts():
    line, key = Lines(500).examples(TOKENIZER, 1)[0], Passkey(500).examples(TOKENIZER, 1)[0]
    both = " <{}>\nline a-b: REGISTER_CONTENT is <1>"
    assert Lines(500).score(both.format(line.answer), line) == {"accuracy": 1.0}
    assert Lines(500, style="chat").score(both.format(line.answer), line) == {"accuracy": 0.0}
    assert Passkey(500).score(f"1 {key.answer}", key) == {"accuracy": 0.0}
    assert Passkey(500, style="chat").score(f"1 {key.answer} 2", key) == {"accuracy": 1.0}


def test_the_line_asked_for_holds_the_answer():
    for example in Lines(10_000, lines=100).examples(TOKENIZER, 5):
        rows = re.findall(
            r"^line (\S+): REGISTER_CONTENT is <(\d+)>$", example.prompt, re.MULTILINE
        )
        assert len(rows) == len(dict(rows)) == example.info["lines"] == 100
        asked = example.prompt.splitlines()[-1]
        key, number = rows[example.info["line"]]
        assert asked == f"line {key}: REGISTER_CONTENT is"
        assert number == example.answer
        assert example.target == f" <{number}>"
    chat = Lines(10_000, lines=100, style="chat").examples(TOKENIZER, 5)
    assert all(not e.target and e.prompt.endswith("I need the number.") for e in chat)


def test_every_line_is_asked_for():
    lines = {e.info["line"] for e in Lines(500, lines=3).examples(TOKENIZER, 30)}
    assert lines == {0, 1, 2}


@pytest.mark.parametrize("make", TASKS[1:])
def test_the_fact_stands_at_its_depth(make):
    examples = make(1000).examples(TOKENIZER, 2)
    assert [e.info["depth"] for e in examples] == [d for d in DEPTHS for _ in range(2)]
    for example in examples:
        # Head, question and fact are not part of the depth: within 8 % of the budget.
        assert example.info["position"] / 1000 == pytest.approx(example.info["depth"], abs=0.08)
        at = example.prompt.index(example.answer)
        assert length(example.prompt[:at]) - example.info["position"] < 20


def test_the_key_is_in_the_prompt_where_the_noise_is_whole():
    example = Passkey(200, depths=(0.5,)).examples(TOKENIZER, 1)[0]
    fact = f"\nThe pass key is {example.answer}. Remember it. {example.answer} is the pass key.\n"
    assert example.prompt.count(fact) == 1
    before, after = (part.count(". ") for part in example.prompt.split(fact))
    assert abs(before - 3 - after) <= 2  # the head has three full stops before its own line ends


def test_several_needles_have_keys_of_their_own_and_one_is_asked_for():
    examples = Needles(1000, ("a/b",), needles=8).examples(TOKENIZER, 2)
    for example in examples:
        pattern = r"One of the special magic numbers for (\S+) is: (\d{7})\."
        found = dict(re.findall(pattern, example.prompt))
        assert len(found) == 8
        key = example.prompt.rpartition(" for ")[2].removesuffix(" is:")
        assert found[key] == example.answer
        hay = re.sub(pattern + " ?", "", example.prompt)
        assert hay.count("Sentence number") == hay.count("is here.")  # no sentence was cut


def test_needles_enter_the_text_at_different_sentences():
    examples = Needles(300, ("a/b",), depths=(0.5,)).examples(TOKENIZER, 4)
    assert len({e.prompt.splitlines()[1][:60] for e in examples}) > 1


def test_pieces_join_to_the_text():
    text = "One. Two!\n\nThree? 3.5 is no end\nA line"
    pieces = retrieval._sentences(text)
    assert "".join(pieces) == text
    assert pieces == ["One. ", "Two!\n\n", "Three? ", "3.5 is no end\n", "A line"]


@pytest.mark.parametrize("depth, expected", [(0, "Fa. b. "), (0.5, "a. Fb. "), (1, "a. b. F")])
def test_a_fact_goes_in_at_a_piece_s_end(depth, expected):
    assert retrieval._insert(["a. ", "b. "], ["F"], [depth]) == expected


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: Lines(0), "tokens: 0"),
        (lambda: Lines(10, lines=0), "lines: 0"),
        (lambda: Lines(10, lines=MAX_KEYS + 1), "lines: 4097"),
        (lambda: Lines(10, style="talk"), "style: 'talk'"),
        (lambda: Passkey(10, depths=()), "depths: ()"),
        (lambda: Passkey(10, depths=(1.5,)), "depths: (1.5,)"),
        (lambda: Needles(10, ()), "texts: name"),
        (lambda: Needles(10, "a/b"), "texts: name"),
        (lambda: Needles(10, ("a/b",), needles=0), "needles: 0"),
        (lambda: Passkey(20).examples(TOKENIZER, 1), "tokens: 20; the shortest prompt"),
        (lambda: Lines(500, lines=100).examples(TOKENIZER, 1), "tokens: 500; this lines prompt"),
        (lambda: Needles(9000, ("a/b",)).examples(TOKENIZER, 1), "texts: fewer than 9000 tokens"),
    ],
)
def test_what_cannot_be_made_is_named(make, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        make()
