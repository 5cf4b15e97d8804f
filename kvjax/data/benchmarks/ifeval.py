"""IFEval (Zhou et al., arXiv 2311.07911): {key, prompt, instruction_id_list, kwargs}.

Judged by lm-eval's copy of the official checkers, strict and loose, per prompt: 1 where every
instruction is followed. Nothing is downloaded: two of the 25 kinds need NLTK's `punkt_tab`, which
a person puts below `$NLTK_DATA`, and are refused without it.
"""

import os
from typing import Any
from unittest import mock

from kvjax.data.benchmarks.base import Benchmark
from kvjax.data.benchmarks.rows import Row
from kvjax.data.task import Example, Scores

KINDS = frozenset(
    """keywords:existence keywords:frequency keywords:forbidden_words keywords:letter_frequency
    language:response_language length_constraints:number_sentences
    length_constraints:number_paragraphs length_constraints:number_words
    length_constraints:nth_paragraph_first_word detectable_content:number_placeholders
    detectable_content:postscript detectable_format:number_bullet_lists
    detectable_format:constrained_response detectable_format:number_highlighted_sections
    detectable_format:multiple_sections detectable_format:json_format detectable_format:title
    combination:two_responses combination:repeat_prompt startend:end_checker startend:quotation
    change_case:capital_word_frequency change_case:english_capital change_case:english_lowercase
    punctuation:no_comma""".split()
)
NEED_PUNKT = frozenset(
    ["length_constraints:number_sentences", "change_case:capital_word_frequency"]
)


def example(row: Row) -> Example:
    """A row as an example without an answer; `info`: id, instructions, kwargs."""
    instructions = row.get("instruction_id_list", kind=list)
    kwargs = row.get("kwargs", kind=list)
    unknown = [str(name) for name in instructions if name not in KINDS]
    if unknown or not instructions:
        raise row.error("instruction_id_list", f"unknown or none: {', '.join(unknown) or '[]'}")
    if len(kwargs) != len(instructions) or not all(isinstance(k, dict) for k in kwargs):
        raise row.error("kwargs", f"must be {len(instructions)} objects, one an instruction")
    info = {"id": row.get("key", kind=(int, str)), "instructions": instructions, "kwargs": kwargs}
    return Example(row.get("prompt"), "", info=info)


def judge(text: str, example: Example) -> Scores:
    """Prompt-level accuracy: `strict` of the text as it is, `loose` also of it without its first
    or last line or its asterisks. `ValueError` names the kinds that can't be checked here."""
    check = _checkers(example.info["instructions"])
    row = {
        "key": example.info["id"],
        "prompt": example.prompt,
        "instruction_id_list": example.info["instructions"],
        "kwargs": example.info["kwargs"],
    }
    found = check(row, [text])
    return {
        "strict": float(found["prompt_level_strict_acc"]),
        "loose": float(found["prompt_level_loose_acc"]),
    }


def _checkers(instructions: list[str]) -> Any:
    """lm-eval's `process_results`, once what `instructions` need is known to be there."""
    try:
        import langdetect
        import nltk

        # On import it would fetch punkt_tab, unless it isn't the first of several processes.
        with mock.patch.dict(os.environ, LOCAL_RANK="1"):
            from lm_eval.tasks.ifeval.utils import process_results
    except ImportError as error:
        remedy = "pip install 'kvjax[eval]'"
        raise ValueError(f"benchmark 'ifeval': scoring needs {error.name}: {remedy}") from None
    langdetect.DetectorFactory.seed = 0  # else its guesses differ from call to call
    refused = sorted(NEED_PUNKT & set(instructions))
    if refused and not _has_punkt(nltk):
        remedy = "put NLTK's tokenizers/punkt_tab below $NLTK_DATA"
        raise ValueError(f"benchmark 'ifeval': cannot check {', '.join(refused)}: {remedy}")
    return process_results


def _has_punkt(nltk: Any) -> bool:
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return False
    return True


BENCHMARK = Benchmark(
    name="ifeval",
    files=("ifeval.jsonl", "IFEval/ifeval_input_data.jsonl", "ifeval_input_data.jsonl"),
    example=example,
    judge=judge,
    metrics=("strict", "loose"),
    requires=("lm_eval", "nltk", "langdetect", "immutabledict"),
)
