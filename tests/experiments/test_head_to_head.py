"""The real loop on a tiny model: what it measures, and what a killed run comes to."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import kvjax
from experiments import points, record, table
from experiments.args import node_at
from experiments.head_to_head.evaluate import compare
from kvjax.data import load_text
from tests.experiments.conftest import CONFIG, ROOT


def results(workdir) -> dict[str, dict]:
    return {each.name: each.result for each in table.load(workdir)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    return {"workdir": tmp_path_factory.mktemp("whole")}


@pytest.fixture
def whole(runs, tiny_config) -> dict[str, dict]:
    """Results of an uninterrupted run of the tiny grid, made once."""
    study = points.study(tiny_config)
    study.validate(tiny_config)
    outcomes = points.run_all(study.points(tiny_config), runs["workdir"])
    assert points.finish(outcomes) == 0
    return results(runs["workdir"])


def test_scores_against_the_model_without_a_cache(whole, tiny_config):
    """The exact row's perplexity is that of one forward pass over the whole texts."""
    model, tokenizer = kvjax.load(tiny_config.model)
    for name, found in zip(tiny_config.texts, whole["exact"]["quality"]["by_text"], strict=True):
        ids = np.asarray(tokenizer.encode(load_text(name).text)[: tiny_config.length + 1])
        log_p = jax.nn.log_softmax(kvjax.forward(model, ids[None, :-1]))[0]
        nll = -np.take_along_axis(np.asarray(log_p), ids[1:, None], axis=1)
        assert found["perplexity"] == pytest.approx(float(np.exp(nll.mean())), rel=1e-4)


def test_exact_is_lossless_and_two_bits_are_not(whole):
    exact, two = whole["exact"]["quality"], whole["kvarn-k2v2"]["quality"]
    assert exact["kl"]["mean"] == 0 and exact["agreement"]["mean"] == 1
    assert exact["perplexity"] == exact["exact_perplexity"] == two["exact_perplexity"]
    # 16 sinks and a tile of 32: the first block reads nothing, nothing is encoded before token 48.
    assert two["kl_by_quarter"][0] == pytest.approx(0, abs=1e-6)
    assert two["kl_by_quarter"][3] > 0.001
    assert two["kl"]["low"] <= two["kl"]["mean"] <= two["kl"]["high"]


def test_bytes_are_those_of_the_cache_that_was_used(whole, tiny_config):
    model, _ = kvjax.load(tiny_config.model)
    capacity = tiny_config.length + tiny_config.decode_tokens
    transform = kvjax.cache(encode=kvjax.encode.kvarn(tile=32), sink=16)
    for name, used in (("exact", kvjax.cache()), ("kvarn-k2v2", transform)):
        expected = kvjax.nbytes(kvjax.init_cache(model, used, batch=2, capacity=capacity)).total
        assert whole[name]["size"]["bytes"] == expected
    assert whole["exact"]["size"]["ratio"] == 1
    assert whole["exact"]["size"]["bits_per_element"] == pytest.approx(32, rel=0.01)
    assert whole["kvarn-k2v2"]["size"]["ratio"] > 2


def test_speed_says_what_it_counted(whole):
    speed = whole["kvarn-k2v2"]["speed"]
    assert speed["tokens"] == 8 and speed["batch"] == 2
    assert speed["ratio"] == speed["tokens_per_second"] / speed["exact_tokens_per_second"] > 0


def test_metrics_follow_the_text(whole, runs):
    lines = (runs["workdir"] / "points/kvarn-k2v2/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [32, 64, 96, 128, 128]
    assert steps[-1]["kl_mean"] == whole["kvarn-k2v2"]["quality"]["kl"]["mean"]


def test_a_killed_launch_goes_on_and_gives_the_same_numbers(whole, tiny_config, tmp_path):
    folder = tmp_path / "points" / "kvarn-k2v2"
    process = launch(tiny_config, tmp_path)
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists(), process)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert list(results(tmp_path)) == ["exact"]

    study = points.study(tiny_config)
    outcomes = points.run_all(study.points(tiny_config), tmp_path)
    assert [(o.name, o.status) for o in outcomes] == [("exact", "skipped"), ("kvarn-k2v2", "done")]
    for name, result in results(tmp_path).items():
        assert result["quality"] == whole[name]["quality"], name
        assert result["blocks"] == whole[name]["blocks"], name


def launch(config, workdir) -> subprocess.Popen:
    fields = (
        "model",
        "texts",
        "length",
        "block",
        "decode_tokens",
        "rows",
        "cache.sink",
        "cache.tile",
    )
    words = [f"--config.{field}={node_at(config, field)}" for field in fields]
    command = [sys.executable, "-m", "experiments.launch", f"--config={CONFIG}:smoke", *words]
    return subprocess.Popen(
        [*command, f"--workdir={workdir}"], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for(there, process: subprocess.Popen, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the launch takes too long"
        time.sleep(0.02)


def test_compare_by_hand():
    logits = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]], np.float32))
    other = np.log(np.array([[[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]], np.float32))
    found = compare(logits, other, np.array([[0, 2]]))
    assert found["kl"][0] == pytest.approx([0.25 * np.log(2), 0], abs=1e-6)
    assert found["nll"][0] == pytest.approx([np.log(4), -np.log(0.8)], rel=1e-5)
    assert found["exact_nll"][0] == pytest.approx([np.log(2), -np.log(0.8)], rel=1e-5)
    assert found["agreement"][0].tolist() == [0, 1]


def test_a_model_without_a_tokenizer_or_with_a_short_context_fails_first(tiny_config, tmp_path):
    study = points.study(tiny_config)
    long = study.points(tiny_config)[:1]
    long[0].config.length = 2048
    (outcome,) = points.run_all(long, tmp_path)
    assert "the model's context is 1024; use less" in outcome.error
    assert record.read_json(tmp_path / "points/exact/config.json")["length"] == 2048
