"""Files in: every public format, and what is wrong with a broken one."""

import gzip
import json
import re

import pytest

from kvjax.data import BENCHMARKS
from tests.data.benchmarks.rows import ROWS, write


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_public_file_becomes_examples(tmp_path, name):
    write(tmp_path, name, ROWS[name], ROWS[name])
    examples = BENCHMARKS[name].load(tmp_path)
    row = ROWS[name]
    question = row.get("problem") or row.get("Problem") or row.get("question") or row["prompt"]
    assert len(examples) == 2
    assert question.strip() in examples[0].prompt


def test_answers_are_read_from_their_fields(tmp_path):
    answers = {}
    for name, row in ROWS.items():
        write(tmp_path, name, row)
        answers[name] = BENCHMARKS[name].load(tmp_path)[0].answer
    assert answers == {
        "math500": "\\frac{1}{3}",
        "aime24": "9",
        "humaneval": "    return math.pi * r * r\n",
        "gsm8k": "1,080",
        "ifeval": "",
    }


def test_the_other_spelling_of_aime(tmp_path):
    row = {"id": 60, "problem": "P?", "solution": "S", "answer": "025", "url": "u", "year": "2024"}
    write(tmp_path, "aime24", row)
    example = BENCHMARKS["aime24"].load(tmp_path)[0]
    assert (example.answer, example.info["id"]) == ("025", 60)
    assert example.prompt.startswith("P?\n\nPlease reason")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_usual_place_is_found_gzipped_too(tmp_path, name):
    benchmark, line = BENCHMARKS[name], json.dumps(ROWS[name]).encode() + b"\n\n"
    assert benchmark.missing(tmp_path) == [str(tmp_path / benchmark.files[0])]
    with pytest.raises(ValueError, match=f"benchmark '{name}': no file in .*{benchmark.files[0]}"):
        benchmark.load(tmp_path)
    for number, file in enumerate(benchmark.files):
        for end, data in (("", line), (".gz", gzip.compress(line))):
            folder = tmp_path / f"{number}{end}"
            path = folder / (file + end)
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
            assert benchmark.find(folder) == path
            assert not benchmark.missing(folder)
            assert len(benchmark.load(folder)) == 1


FIELDS = {
    "math500": ("problem", "answer", "subject", "level", "unique_id"),
    "aime24": ("ID", "Problem", "Answer"),
    "humaneval": ("task_id", "prompt", "entry_point", "canonical_solution", "test"),
    "gsm8k": ("question", "answer"),
    "ifeval": ("key", "prompt", "instruction_id_list", "kwargs"),
}


@pytest.mark.parametrize("name, field", [(n, f) for n, fields in FIELDS.items() for f in fields])
@pytest.mark.parametrize("value", ["absent", None, True, 1.5])
def test_a_missing_field_and_a_wrong_type_are_named(tmp_path, name, field, value):
    broken = {key: v for key, v in ROWS[name].items() if key != field}
    if value != "absent":
        broken[field] = value
    path = write(tmp_path, name, ROWS[name], broken)
    problem = "missing" if value == "absent" else f"must be .* is {type(value).__name__}"
    where = re.escape(f"{path}:2: field ")
    with pytest.raises(ValueError, match=f"{where}.*{field}.*: {problem}"):
        BENCHMARKS[name].load(tmp_path)


@pytest.mark.parametrize(
    "name, field, value, problem",
    [
        ("aime24", "Answer", "1000", "whole number from 0 to 999, is '1000'"),
        ("aime24", "Answer", -1, "whole number from 0 to 999, is '-1'"),
        ("gsm8k", "answer", "1080", "must end with '#### ' and a number"),
        ("gsm8k", "answer", "#### none", "must end with '#### ' and a number"),
        ("ifeval", "instruction_id_list", ["punctuation:no_dash", 3], "punctuation:no_dash, 3"),
        ("ifeval", "instruction_id_list", [], "unknown or none"),
        ("humaneval", "entry_point", "a b", "must be a function's name, is 'a b'"),
        ("ifeval", "kwargs", [{}], "must be 2 objects"),
        ("ifeval", "kwargs", [{}, None], "must be 2 objects"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, name, field, value, problem):
    path = write(tmp_path, name, ROWS[name] | {field: value})
    with pytest.raises(ValueError, match=re.escape(f"{path}:1: field {field}: ") + f".*{problem}"):
        BENCHMARKS[name].load(tmp_path)


@pytest.mark.parametrize(
    "name, data, problem",
    [
        ("gsm8k.jsonl", b'\n{"question": ', "gsm8k.jsonl:2: broken JSON"),
        ("gsm8k.jsonl", b"[1]", "gsm8k.jsonl:1: must be a JSON object, is list"),
        ("gsm8k.jsonl", b" \n", "gsm8k.jsonl: holds no row"),
        ("gsm8k.jsonl", b"\xff\xfe", "gsm8k.jsonl: cannot be read as JSON lines"),
        ("gsm8k.jsonl.gz", b"{}", "gsm8k.jsonl.gz: cannot be read as JSON lines"),
        ("gsm8k.jsonl.gz", gzip.compress(b"{}" * 99)[:-9], "cannot be read as JSON lines"),
    ],
)
def test_a_file_that_is_no_json_lines(tmp_path, name, data, problem):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=problem):
        BENCHMARKS["gsm8k"].load(tmp_path)


def test_packages_that_scoring_needs_are_listed():
    assert not BENCHMARKS["aime24"].unmet()
    listed = {name: set(b.unmet()) <= set(b.requires) for name, b in BENCHMARKS.items()}
    assert all(listed.values())
    assert "math_verify" in BENCHMARKS["math500"].requires
