"""IFEval through lm-eval's checkers: what is handed over, and the real ones where installed."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvjax.data import BENCHMARKS
from kvjax.data.benchmarks import ifeval
from kvjax.data.benchmarks.rows import Row
from tests.data.benchmarks.rows import ROWS

BENCHMARK = BENCHMARKS["ifeval"]
NUMBER_OF_SENTENCES = {
    "instruction_id_list": ["length_constraints:number_sentences"],
    "kwargs": [{"relation": "at least", "num_sentences": 2}],
}


def example(**changes):
    return ifeval.example(Row(ROWS["ifeval"] | changes, "a:1"))


def test_there_are_25_kinds():
    assert len(ifeval.KINDS) == 25
    assert ifeval.NEED_PUNKT < ifeval.KINDS


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules in place of the real ones; the list gets every call of the checker."""
    calls: list = []

    def process_results(row, texts):
        calls.append((row, texts))
        strict = "," not in texts[0]
        return {"prompt_level_strict_acc": strict, "prompt_level_loose_acc": True}

    def find(name):
        raise LookupError(name)

    modules = {
        "nltk": {"data": SimpleNamespace(find=find)},
        "langdetect": {"DetectorFactory": SimpleNamespace(seed=None)},
        "lm_eval": {},
        "lm_eval.tasks": {},
        "lm_eval.tasks.ifeval": {},
        "lm_eval.tasks.ifeval.utils": {"process_results": process_results},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_the_row_and_the_answer_are_handed_over(stand_ins):
    question = example()
    assert BENCHMARK.score("<think>a, b</think>Elbe and Rhine", question) == {
        "strict": 1.0,
        "loose": 1.0,
    }
    assert BENCHMARK.score("Elbe, Rhine", question) == {"strict": 0.0, "loose": 1.0}
    assert stand_ins[0] == (ROWS["ifeval"], ["Elbe and Rhine"])
    assert sys.modules["langdetect"].DetectorFactory.seed == 0


def test_kinds_that_need_missing_data_are_refused(stand_ins):
    with pytest.raises(ValueError, match="cannot check length_constraints:number_sentences: put"):
        BENCHMARK.score("One. Two.", example(**NUMBER_OF_SENTENCES))
    assert not stand_ins
    sys.modules["nltk"].data.find = lambda name: name
    assert BENCHMARK.score("One. Two.", example(**NUMBER_OF_SENTENCES))["strict"] == 1


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ValueError, match=r"'ifeval': scoring needs langdetect: pip install"):
        BENCHMARK.score("Elbe", example())


REAL = [
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("keywords:existence", {"keywords": ["elbe"]}, "The Elbe.", "The Rhine."),
    ("keywords:frequency", {"keyword": "elbe", "frequency": 2, "relation": "at least"},
     "Elbe, elbe", "Elbe"),
    ("keywords:forbidden_words", {"forbidden_words": ["elbe"]}, "Rhine", "Elbe"),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "at least"},
     "Elbe", "Rhin"),
    ("language:response_language", {"language": "de"},
     "Das ist ein kurzer deutscher Satz.", "This is a short English sentence."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "a b", "a b c"),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[name]", "name"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP.S. b", "a b"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*a*", "a"),
    ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2},
     "Part 1\na\nPart 2\nb", "Part 1\na"),
    ("detectable_format:json_format", {}, '{"a": 1}', "a"),
    ("detectable_format:title", {}, "<<a>>\nb", "a\nb"),
    ("combination:two_responses", {}, "a\n******\nb", "a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Go"}, "Go a", "a"),
    ("startend:end_checker", {"end_phrase": "The end."}, "a. The end.", "a"),
    ("startend:quotation", {}, '"a"', "a"),
    ("change_case:english_capital", {}, "THIS IS A SHORT SENTENCE", "This is a short sentence"),
    ("change_case:english_lowercase", {}, "this is a short sentence", "This is a short sentence"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind, kwargs, right, wrong", REAL)
def test_the_real_checkers(kind, kwargs, right, wrong):
    if BENCHMARK.unmet() or importlib.util.find_spec("datasets") is None:
        pytest.skip("lm-eval[ifeval] is not installed (extra: eval)")
    padded = dict.fromkeys(("language", "num_words"), None) | kwargs  # as the hub pads them
    question = example(instruction_id_list=[kind], kwargs=[padded])
    assert BENCHMARK.score(right, question) == {"strict": 1.0, "loose": 1.0}
    assert BENCHMARK.score(wrong, question)["strict"] == 0.0
