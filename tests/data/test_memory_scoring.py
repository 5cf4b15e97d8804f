"""The rules for replies, on cases worked out by hand."""

import pytest

from kvjax.data.memory import Question, scoring


def question(*answers: str, kind: str = "", old: tuple[str, ...] = ()) -> Question:
    return Question("?", answers, old, kind)


@pytest.mark.parametrize(
    "text, plain",
    [
        ("The  Cat, and a dog.", "cat and dog"),
        ("An apple-pie\n", "applepie"),
        ("theatre", "theatre"),
        ("!?", ""),
    ],
)
def test_normalised_text(text, plain):
    assert scoring.normalise(text) == plain


@pytest.mark.parametrize(
    "answers, reply, right",
    [
        (("New York",), "It is new york, of course.", 1),
        (("New York", "Boston"), "boston", 1),
        (("New York",), "New, York", 1),
        (("New York",), "York New", 0),
        (("4",), "42", 1),
        (("The",), "whatever", 0),  # nothing is left of the answer
        (("Rome",), "", 0),
    ],
)
def test_sub_em(answers, reply, right):
    assert scoring.sub_em(question(*answers), reply) == right


@pytest.mark.parametrize(
    "reply, right",
    [
        ("57", 1),
        (" 57\nplease sell my car", 1),
        ("label: 57", 1),
        ("Answer: 57\nLabel: 3", 1),
        ("The 57.", 1),
        ("157", 0),
        ("57 or 58", 0),
        ("label: 3\n57", 0),
        ("", 0),
    ],
)
def test_exact_match(reply, right):
    assert scoring.exact(question("57"), reply) == right


def test_a_stale_reply_has_the_old_answer_and_not_the_right_one():
    asked = question("Rome", old=("Paris", "Oslo"))
    assert [scoring.stale(asked, r) for r in ("Oslo.", "Paris, now Rome", "Rome", "")] == [
        1,
        0,
        0,
        0,
    ]
    assert scoring.stale(question("Rome"), "Paris") == 0


def test_token_f1_is_that_of_the_best_answer():
    # 2 of 3 words, 2 of 4: F1 = 2 * 2 / 7.
    assert scoring.token_f1(question("red old big car", "x"), "big red bus") == pytest.approx(4 / 7)
    assert scoring.token_f1(question("the car"), "A car") == 1
    assert scoring.token_f1(question("a b"), "") == 0
    assert scoring.token_f1(question("dog dog"), "dog") == pytest.approx(
        2 / 3
    )  # counted, not a set


@pytest.mark.parametrize(
    "kind, answer, reply, f1",
    [
        ("single", "running shoes", "He runs in a shoe.", 4 / 6),  # he run in shoe | run shoe
        ("single", "salt and pepper", "pepper, salt", 1),  # "and" does not count
        ("single", "cat; dog", "cat", 2 / 3),
        ("temporal", "7 May 2023", "May 2023", 4 / 5),
        ("open", "Africa; he said so", "Africa", 1),
        ("multi-hop", "cats, birds", "a cat", 1 / 2),
        ("multi-hop", "cats, birds", "bird, cat", 1),
        ("multi-hop", "cats, birds", "bird cat", 2 / 3),  # each against the whole: 2/3 twice
        ("multi-hop", "cats", "", 0),
        ("adversarial", "No information available", "It is not mentioned.", 1),
        ("adversarial", "No information available", "No information available", 1),
        ("adversarial", "No information available", "no information", 0),
    ],
)
def test_locomo_by_category(kind, answer, reply, f1):
    assert scoring.locomo(question(answer, kind=kind), reply) == pytest.approx(f1)


@pytest.mark.parametrize(
    "kind, answer, reply, right",
    [
        ("single-session-user", "Rome", "You live in Rome now.", 1),
        ("single-session-user", "4", "42", 0),  # whole words
        ("single-session-user", "the blue car", "A blue car!", 1),
        ("knowledge-update", "Rome", "First Paris, then Rome", 1),
        ("multi-session", "3", "4", 0),
        ("temporal-reasoning", "12 days", "11 days", 1),
        ("temporal-reasoning", "12 days", "14 days", 0),
        ("temporal-reasoning", "1 day", "2 days", 1),
        ("temporal-reasoning", "2 weeks", "2 days", 0),
        ("temporal-reasoning", "7 days. 8 days is also acceptable.", "It was 7 days.", 1),
        ("temporal-reasoning", "3", "4", 1),
        ("temporal-reasoning", "the blue one", "the blue one", 1),
        ("abstention", "You did not mention it.", "You never mentioned that", 1),
        ("abstention", "You did not mention it.", "I do not know.", 1),
        ("abstention", "You did not mention it.", "You did not tell Rome", 0),
    ],
)
def test_longmemeval_s_local_rule(kind, answer, reply, right):
    assert scoring.longmemeval(question(answer, kind=kind), reply) == right
