"""scripts/bench/decode.py: its arithmetic on made-up answers, and our side run on a tiny model."""

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/bench/decode.py"
TINY = ROOT / "tests/golden/hf/llama"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_decode", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeWorker:
    """Answers with the seconds it was given, in order, and writes down who was asked when."""

    def __init__(self, side: str, seconds: list[float], asked: list[tuple[str, str]]) -> None:
        self.side, self.seconds, self.asked = side, list(seconds), asked

    def ask(self, word: str) -> dict:
        self.asked.append((self.side, word))
        seconds = self.seconds.pop(0) if word in ("prefill", "decode") else 9.0
        return {
            "seconds": seconds,
            "cpu": 2 * seconds,
            "others": 0.0,
            "peak": 2**20,
            "load_peak": 2**20,
            "first": [1],
        }


def result(side: str, decode: float, prefill: float, **changes: object) -> dict:
    return {
        "side": side,
        "context": 512,
        "batch": 1,
        "decode_tokens_per_second": decode,
        "prefill_tokens_per_second": prefill,
        "others": 0.0,
        "peak_bytes": 100 * 2**20,
        "decode_seconds": [1.0, 1.0],
        "prefill_seconds": [1.0, 1.0],
        "first_tokens": [1, 2],
        **changes,
    }


def test_sides_take_turns_and_the_best_repetition_counts(bench: ModuleType) -> None:
    asked: list[tuple[str, str]] = []
    workers = [
        FakeWorker("exact", [4, 2, 2, 1], asked),
        FakeWorker("hf-static", [8, 8, 4, 4], asked),
    ]
    args = Namespace(repeats=2, seconds=100, steps=10, by="seconds")
    ours, peer = bench.measure(workers, args, context=20, batch=3)
    assert [side for side, word in asked if word == "decode"] == ["exact", "hf-static"] * 2
    assert ours["prefill_tokens_per_second"] == 3 * 20 / 2
    assert ours["decode_tokens_per_second"] == 3 * 10 / 1
    assert peer["decode_tokens_per_second"] == 3 * 10 / 4


def test_rates_can_be_by_cpu_second(bench: ModuleType) -> None:
    args = Namespace(repeats=1, seconds=100, steps=10, by="cpu")
    (one,) = bench.measure([FakeWorker("exact", [4, 2], [])], args, context=20, batch=1)
    assert one["decode_tokens_per_second"] == 10 / 4  # FakeWorker takes two CPU seconds a second
    assert bench.remarks([one], {"repeats": 1, "by": "cpu"}) == [
        "Tokens per CPU second of one thread."
    ]


def test_a_side_stops_when_its_time_is_spent(bench: ModuleType) -> None:
    asked: list[tuple[str, str]] = []
    slow, quick = FakeWorker("exact", [6, 6, 6], asked), FakeWorker("int8", [1, 1, 1], asked)
    answers = bench.take_turns([slow, quick], "decode", 3, 10)
    assert {side: len(found) for side, found in answers.items()} == {"exact": 2, "int8": 3}


def test_ratios_are_to_the_faster_peer_of_each_measure(bench: ModuleType) -> None:
    rows = [
        result("exact", 30, 300),
        result("int8", 15, 300),
        result("hf-dynamic", 10, 200),
        result("hf-static", 20, 100),
    ]
    lines = bench.table(rows).splitlines()
    assert lines[2] == "| 512 | 1 | exact | 30.0 | 1.50× | 1.00× | 300.0 | 1.50× | 100 | 1.00× |"
    assert lines[3] == "| 512 | 1 | int8 | 15.0 | 0.75× | 0.50× | 300.0 | 1.50× | 100 | 1.00× |"
    assert lines[5].startswith("| 512 | 1 | hf-static | 20.0 | 1.00× | – |")


def test_a_table_without_peers_has_no_ratio_to_them(bench: ModuleType) -> None:
    assert "| exact | 30.0 | – | 1.00× |" in bench.table([result("exact", 30, 300)])


def test_what_spoils_a_number_is_said(bench: ModuleType) -> None:
    info = {"repeats": 2, "by": "seconds"}
    assert bench.remarks([result("exact", 1, 1), result("hf-static", 1, 1)], info) == []
    loud = bench.remarks([result("exact", 1, 1, others=0.5)], info)
    fewer = bench.remarks([result("exact", 1, 1, decode_seconds=[1.0])], info)
    other = bench.remarks(
        [result("exact", 1, 1), result("hf-static", 1, 1, first_tokens=[1, 3])], info
    )
    assert "50% of the cores" in loud[0]
    assert "best of 1 only" in fewer[0]
    assert "chose other tokens" in other[0]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--peers", "", *options]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_an_unknown_cache_is_refused() -> None:
    assert "none of exact, int8, kvarn" in run("--caches", "int7").stderr


def test_cpu_seconds_of_several_threads_are_refused() -> None:
    assert "add --threads 1" in run("--by", "cpu", "--threads", "2").stderr


@pytest.mark.slow
def test_our_side_runs_on_a_tiny_model(tmp_path: Path) -> None:
    sizes = ["--contexts", "200", "--batches", "2", "--repeats", "1", "--steps", "3"]
    done = run("--model", str(TINY), "--caches", "exact,int8", "--out", str(tmp_path), *sizes)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "decode.jsonl").read_text().splitlines()]
    assert [row["side"] for row in rows[1:]] == ["exact", "int8"]
    assert all(row["decode_tokens_per_second"] > 0 for row in rows[1:])
    assert all(len(row["first_tokens"]) == 4 + 3 for row in rows[1:])
    assert "| 200 | 2 | int8 |" in (tmp_path / "decode.md").read_text()
