"""The paper's own setting, run as it is on a tiny folder and two problems."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments import papers, points, start, table
from experiments.args import check_types, config_module, with_overrides
from experiments.kvarn import answering, measured, paper, paper_report
from experiments.table import Result
from kvjax.data import Example
from kvjax.io.tokenizer import Tokenizer
from tests.experiments.conftest import CONFIG, ROOT, byte_tokenizer
from tests.experiments.test_table import rows_of

PROBLEMS = [
    {"question": "Two and three?", "answer": "They make 5.\n#### 5"},
    {"question": "How many legs have seven cats, all of them together?", "answer": "#### 28"},
    {"question": "Ten less one?", "answer": "#### 9"},
]


@pytest.fixture
def tiny(tiny_model, tmp_path) -> ConfigDict:
    """The paper's config with one tiny model, GSM8K's first two of three rows, 4 new tokens."""
    data = tmp_path / "benchmarks"
    data.mkdir()
    lines = [json.dumps(problem) + "\n" for problem in PROBLEMS]
    (data / "gsm8k.jsonl").write_text("".join(lines), "utf-8")
    config = paper.paper_config()
    config.models_folder, config.data_folder = str(tiny_model.parent), str(data)
    config.models = {"tiny": {"folder": "tiny", "temperature": 0.8, "top_p": 0.95, "top_k": 50,
                              "benchmarks": ("gsm8k", "lines_3")}}  # fmt: skip
    config.benchmarks = {"gsm8k": {"max_new": 4, "sink": 4, "lines": 0},
                         "lines_3": {"max_new": 4, "sink": 4, "lines": 3}}  # fmt: skip
    config.only = {"models": (), "benchmarks": ("gsm8k",), "methods": ("quarot",)}
    config.tile, config.dtype, config.limit, config.line_prompts = 32, "float32", 2, 1
    paper.validate(config)
    return config


def run(config: ConfigDict, folder) -> tuple[dict, list[dict]]:
    folder.mkdir(exist_ok=True)
    (point,) = paper.points(config)
    result = paper.run_point(point.config, folder)
    lines = (folder / "answers.jsonl").read_text("utf-8").splitlines()
    return result, [json.loads(line) for line in lines[1:]]


def test_the_papers_config_is_whole():
    config = paper.paper_config()
    check_types(config, paper.paper_config())
    paper.validate(config)
    names = [point.name for point in paper.points(config)]
    assert len(names) == len(set(names)) == (10 + 10 + 7) * len(config.methods)
    found = {point.name: point.config for point in paper.points(config)}
    phi, llama = found["phi4,math500,kivi"], found["llama31_8b,ifeval,kvarn"]
    assert phi.model.temperature == 0.8 and phi.model.top_k == 50 and phi.cache.sink == 128
    assert phi.benchmark.max_new == 8192 and len(phi.seeds) == 3
    assert llama.cache.sink == 32 and llama.cache.encode.scale_bits == 8


def test_two_problems_from_start_to_result(tiny, tmp_path):
    result, rows = run(tiny, tmp_path / "point")
    assert len(rows) == 2 * 3 and {row["seed"] for row in rows} == {0, 1, 2}
    assert {row["tokens"] for row in rows} == {4}  # nothing ends this model's text
    assert result["answers"] == {"count": 6, "mean_tokens": 4.0, "finished": 0.0}
    score = result["scores"]["accuracy"]
    assert 0 <= score["mean"] <= 1 and len(score["by_repeat"]) == 3
    assert "n = 2 of 3 prompts × 3 repeats" in paper_report.scale(result)
    assert "accuracy, % (n = 2 × 3)" in paper_report.cells(result)
    assert result["size"]["bits_per_element"] < 32


def test_a_killed_run_goes_on_and_answers_the_same(tiny, tmp_path, monkeypatch):
    whole = run(tiny, tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    text = (tmp_path / "whole" / "answers.jsonl").read_text("utf-8")
    header, first, second, *_ = text.splitlines(keepends=True)
    (tmp_path / "killed" / "answers.jsonl").write_text(header + first + second[:20], "utf-8")
    calls = []
    generate = answering.kvjax.generate
    monkeypatch.setattr(
        answering.kvjax, "generate", lambda *a, **k: calls.append(1) or generate(*a, **k)
    )
    assert run(tiny, tmp_path / "killed") == whole
    assert len(calls) == 3  # the first answer was there, but its batch runs again as a whole
    assert len({row["text"] for row in whole[1] if row["index"] == 0}) > 1  # seeds differ


def test_answers_of_another_config_are_refused(tiny, tmp_path):
    run(tiny, tmp_path / "point")
    tiny.models.tiny.temperature = 0.5
    with pytest.raises(ValueError, match="answers of another config; delete it"):
        run(tiny, tmp_path / "point")


def test_lines_are_made_here(tiny):
    tiny.only.benchmarks = ("lines_3",)
    (point,) = paper.points(tiny)
    task, (example,) = answering.task_and_examples(point.config, byte_tokenizer())
    assert example.info["lines"] == 3
    score = answering.summary(np.array([[task.score(example.answer, example)["accuracy"]]]))
    assert score == {"mean": 1.0, "low": 1.0, "high": 1.0, "std": None, "by_repeat": [1.0]}
    assert paper.missing_files([point]) == []


def test_layers_at_the_ends_stay_exact(tiny):
    tiny.only.methods = ("turboquant", "fp16")
    exact, turboquant = paper.points(tiny)
    model, _ = answering.open_model(exact.config)
    sizes = [
        answering.size(model, answering.transform(point.config), 256)["bits_per_element"]
        for point in (exact, turboquant)
    ]
    assert sizes[0] == sizes[1] > 32  # a model of two layers is all ends
    turboquant.config.exact_ends = 0
    assert answering.size(model, answering.transform(turboquant.config), 256)["bytes"] < 256 * 256


def test_a_dry_run_lists_exactly_what_is_missing(tiny, tmp_path, tiny_model):
    chosen = paper.points(tiny)
    assert paper.missing_files(chosen) == []
    tiny.models.tiny.folder = "absent"
    tiny.data_folder = str(tmp_path / "nowhere")
    chosen = paper.points(tiny)
    absent = tiny_model.parent / "absent"
    names = ("config.json", "tokenizer.json", "model.safetensors")
    expected = [*(str(absent / name) for name in names), str(tmp_path / "nowhere/gsm8k.jsonl")]
    assert paper.missing_files(chosen) == expected
    lines = paper.dry_run(tiny, chosen)
    assert [line for line in lines if line.startswith("missing")] == [
        f"missing file: {path}" for path in expected
    ]
    assert "at most 4 new tokens, temperature 0.8, top-p 0.95, top-k 50" in lines[0]


def test_the_dry_run_of_the_command_runs_nothing(tmp_path):
    config = f"--config={ROOT}/configs/kvarn.py:paper"
    command = [sys.executable, "-m", "experiments.launch", config, "--dry_run",
               "--config.only.methods=('kvarn',)", "--config.models_folder=m"]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    first = "qwen3_4b,aime24,kvarn: Qwen/Qwen3-4B, kvarn-k2v2, 128 sinks, all prompts, 3 repeats"
    assert any(line.startswith(first) for line in lines)
    assert "27 points" in lines and not list(tmp_path.iterdir())
    missing = [line for line in lines if line.startswith("missing file: ")]
    assert len(missing) == 3 * 3 + 4 and "missing file: m/Qwen/Qwen3-4B/config.json" in missing


def test_a_study_without_a_dry_run_lists_its_points():
    config = config_module(CONFIG)[0].get_config("smoke")
    chosen = points.study(config).points(config)
    assert start.dry_run(config, chosen) == ["exact", "int8", "kvarn-k2v2"]


def test_shards_are_those_of_the_index(tmp_path):
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    names = [path.name for path in paper.model_files(tmp_path)]
    assert names == ["config.json", "tokenizer.json", "x-1.safetensors", "x-2.safetensors"]


def test_a_chat_template_is_used_where_there_is_one():
    plain = byte_tokenizer()
    chat = Tokenizer(plain.backend, template="<{{ messages[0].content }}|")
    example = Example("Why?", "")
    assert plain.decode(answering.prompt_ids(plain, example)) == "Why?"
    assert plain.decode(answering.prompt_ids(chat, example)) == "<Why?|"


def test_an_answer_ends_before_its_stop(tiny, monkeypatch):
    tokenizer = byte_tokenizer()
    tokenizer.eos_ids = (7,)
    ids = tokenizer.encode("ab")
    found = [[ids[0], 7, 7, 7], [ids[0], ids[1], ids[1], ids[0]]]
    monkeypatch.setattr(answering.kvjax, "generate", lambda *_, **__: found)
    (point,) = paper.points(tiny)
    rows = list(answering.answer_batch(point.config, None, tokenizer, [ids, ids], 0, range(2)))
    assert [(row["text"], row["finished"]) for row in rows] == [("a", True), ("abba", False)]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"batch": 0}, r"config\.batch=0: use 1"),
     ({"seeds": (1, 1)}, r"config\.seeds=\(1, 1\): name distinct"),
     ({"dtype": "float16"}, r"config\.dtype='float16'"),
     ({"models.phi4.top_p": 0.0}, r"config\.models\.phi4: top_p is 0"),
     ({"models.phi4.benchmarks": ("gsm9k",)}, r"models\.phi4\.benchmarks: no 'gsm9k'"),
     ({"benchmarks.math500.max_new": 0}, r"config\.benchmarks\.math500\.max_new=0"),
     ({"only.methods": ("polarquant",)}, r"config\.only\.methods: no 'polarquant'; choose fp16")],
)  # fmt: skip
def test_impossible_configs(change, message):
    with pytest.raises(ValueError, match=message):
        paper.validate(with_overrides(paper.paper_config(), change))


def test_too_many_new_tokens_for_the_model(tiny, tmp_path):
    tiny.benchmarks.gsm8k.max_new = 1020
    with pytest.raises(ValueError, match=r"max_new=1020: with the longest prompt \d+ tokens"):
        run(tiny, tmp_path / "point")


def result_of(benchmark: str, metric: str, score: dict | None, method: str = "kvarn") -> Result:
    scale = {"model": "Qwen3-4B", "parameters": 4e9, "dtype": "bfloat16", "benchmark": benchmark,
             "method": method, "problems": 30, "total": 30, "repeats": 3, "max_new": 9}  # fmt: skip
    answers = {"count": 90, "mean_tokens": 7.5, "finished": 0.5}
    result = {"part": "paper", "scale": scale, "scores": {metric: score}, "answers": answers,
              "size": {"tokens": 99, "bytes": 999, "bits_per_element": 2.5}}  # fmt: skip
    origin = {"commit": "0123456789", "command": "python -m launch"}
    return Result(f"{benchmark},{method}", {"experiment": "kvarn"}, origin, result)


SCORE = {"mean": 0.5, "std": 0.01, "low": 0.4, "high": 0.6, "by_repeat": [0.5] * 3}


def test_results_find_their_place_in_the_papers_tables():
    results = [
        result_of("aime24", "accuracy", SCORE),
        result_of("lines_300", "accuracy", SCORE, "fp16"),
        result_of("humaneval", "pass@1", None),  # programs that nobody ran
        result_of("gsm8k", "accuracy", SCORE),  # not in the paper
    ]
    found = list(measured.measured(results))
    assert [(m.table, m.model, m.method, m.metric, m.text) for m in found] == [
        ("generation", "Qwen3-4B", "KVarN", "AIME24", "50.0 ± 1.0 (n = 30 × 3)"),
        ("line_retrieval", "Qwen3-4B", "FP16", "300 lines", "50.0 ± 1.0 (n = 30 × 3)"),
    ]
    assert found[0].scale.startswith("Qwen3-4B (4,000M parameters, bfloat16), aime24")
    published = papers.read("kvarn")
    _, *ours = papers.markdown(published, found).split("50.0 ± 1.0 (n = 30 × 3) (Qwen3-4B (4,000M")
    assert len(ours) == 2  # both beside the paper's own numbers


def test_our_own_table_and_picture():
    group = [result_of("aime24", "accuracy", SCORE, method) for method in ("heed", "kvarn", "fp16")]
    text = table.markdown(group, [])
    header, _, *rows = rows_of(text)
    assert [row[0] for row in rows] == ["aime24,fp16", "aime24,kvarn", "aime24,heed"]
    assert rows[1][header.index("accuracy, % (n = 30 × 3)")] == "50.0 ± 1.0 [40.0, 60.0]"
    assert "n = 30 prompts × 3 repeats" in text and "95 % t interval over prompts" in text
    axes = paper_report.draw("scale", group).axes
    assert [words.get_text() for words in axes[0].texts] == ["heed", "kvarn", "fp16"]


def test_other_parts_stand_under_the_papers_tables_with_their_scale():
    share, bits = {"mean": 0.1, "low": 0.05, "high": 0.15}, {"mean": 2.375}
    scale = {"model": "m", "parameters": 135e6, "dtype": "float32", "texts": ["a"], "block": 2,
             "tokens_sha256": "01234567", "length": 8, "positions": 8,
             "regime": "decode"}  # fmt: skip
    asked = scale | {"task": "lines", "n": 40, "prompt_tokens": 500.0}
    parts = {
        "drift": {"scale": scale, "quality": {"kl": share}, "bits": bits},
        "paired": {"scale": scale, "quality": {"kl": share},
                   "blocks": {"attention_mae": [[0.1, 0.3], [0.3, 0.5]]}},
        "retrieval": {"scale": asked, "accuracy": share, "nll": share, "bits": bits},
    }  # fmt: skip
    results = [
        Result(f"lines-{part}", {"experiment": "kvarn"}, {}, {"part": part, **result})
        for part, result in parts.items()
    ]
    found = {(m.table, m.method, m.metric): m for m in measured.measured(results)}
    kl = found["drift", "lines-drift", "KL, nats"]
    assert kl.text == "0.1000 [0.0500, 0.1500] (n = 8)" and kl.scale.startswith("m (135M")
    assert found["drift", "lines-drift", "bits per element"].text == "2.375"
    assert found["drift", "lines-paired", "attention MAE"].text.startswith("0.3000 [")
    lines = found["line_retrieval", "retrieval", "lines found, %"]
    assert lines.text == "10.0 [5.0, 15.0] (n = 40)" and "n = 40 prompts of 500" in lines.scale
    text = papers.markdown(papers.read("kvarn"), list(found.values()))
    assert text.count("*Ours, at another scale:*") == 3
    assert "ours: KL" not in text  # the paper's KL is of another model
