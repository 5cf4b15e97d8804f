import json

import pytest

from experiments import record


def test_json_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    with pytest.raises(ValueError):
        record.write_json(path, {"kl": float("nan")})
    assert not path.exists()
    monkeypatch.setattr(record.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        record.write_json(path, {"kl": 1})
    assert not path.exists()


def test_damaged_json_names_the_file(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"result\.json: not JSON"):
        record.read_json(path)


def test_environment_says_what_ran():
    found = record.environment()
    assert found["versions"]["jax"] and found["python"].startswith("3.")
    assert found["command"].startswith("python")
    assert set(found) >= {"commit", "cpu", "cores", "platform"}


def test_metrics_go_to_lines_and_to_tensorboard(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("what a killed run left\n")
    with record.Metrics(tmp_path) as metrics:
        metrics.write(1, {"kl": 0.5})
        metrics.write(2, {"kl": 0.25})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "kl": 0.5}, {"step": 2, "kl": 0.25}]
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"kl" in events.read_bytes()


def test_a_value_that_is_not_finite_stops_the_run(tmp_path):
    with record.Metrics(tmp_path) as metrics, pytest.raises(FloatingPointError, match="kl is nan"):
        metrics.write(3, {"kl": float("nan")})
