"""The runner, with a study made here that needs no model."""

import sys
import types

import pytest
from ml_collections import ConfigDict

from experiments import points, record
from experiments.points import Point, finish, run_all


@pytest.fixture
def study(monkeypatch):
    """`experiments.fake`: multiplies by two, fails where told to, and counts its runs."""
    module = types.ModuleType("experiments.fake")
    module.runs = []

    def run_point(config, folder):
        module.runs.append(folder.name)
        if config.fail:
            raise RuntimeError("no luck")
        return {"value": 2 * config.x}

    module.run_point = run_point
    monkeypatch.setitem(sys.modules, "experiments.fake", module)
    return module


def point(name: str, x: int = 1, fail: bool = False) -> Point:
    return Point(name, ConfigDict({"experiment": "fake", "x": x, "fail": fail, "t": ("a",)}))


def test_a_point_leaves_its_four_files(study, tmp_path):
    assert finish(run_all([point("a", x=3)], tmp_path)) == 0
    folder = tmp_path / "points" / "a"
    assert record.read_json(folder / "result.json")["value"] == 6
    assert record.read_json(folder / "config.json")["x"] == 3
    assert (folder / "environment.json").exists()


def test_finished_points_are_skipped_and_failed_ones_run_again(study, tmp_path, capsys):
    grid = [point("a"), point("b", fail=True), point("c")]
    outcomes = run_all(grid, tmp_path)
    assert [(o.name, o.status) for o in outcomes] == [("a", "done"), ("b", "failed"), ("c", "done")]
    assert finish(outcomes) == 1
    assert "FAILED b: RuntimeError: no luck" in capsys.readouterr().out
    assert "no luck" in (tmp_path / "points" / "b" / "error.txt").read_text()
    assert not (tmp_path / "points" / "b" / "result.json").exists()

    run_all(grid, tmp_path)
    assert study.runs == ["a", "b", "c", "b"]
    monkey = [point("a"), point("b"), point("c")]  # mended
    assert finish(run_all(monkey, tmp_path)) == 0
    assert not (tmp_path / "points" / "b" / "error.txt").exists()


def test_a_result_of_another_config_is_never_taken_for_this_one(study, tmp_path):
    run_all([point("a", x=1)], tmp_path)
    with pytest.raises(ValueError, match=r"another config \(different: config\.x\)"):
        run_all([point("a", x=2)], tmp_path)


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "..", "twice"])
def test_names_that_cannot_be_folders(study, tmp_path, name):
    with pytest.raises(ValueError, match=r"point name|two points"):
        run_all([point(name), point("twice")], tmp_path)
    assert study.runs == []


def test_an_unknown_study_names_the_field(tmp_path):
    with pytest.raises(ValueError, match=r"config\.experiment='nothing': there is no"):
        points.study(ConfigDict({"experiment": "nothing"}))


def test_no_progress_bar_where_there_is_no_terminal(study, tmp_path, capsys):
    run_all([point("a"), point("b")], tmp_path)
    out, err = capsys.readouterr()
    assert err == "" and "\r" not in out
    assert out.splitlines() == ["done: a", "done: b"]


def test_a_progress_bar_with_the_time_left_in_a_terminal(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run_all([point("a"), point("b")], tmp_path)
    assert "2/2 [" in capsys.readouterr().err


def test_ray_is_only_needed_when_asked_for(study, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    run_all([point("a")], tmp_path)
    with pytest.raises(ValueError, match=r"Ray is not installed; pip install 'kvjax\[ray\]'"):
        run_all([point("b")], tmp_path, "ray")


def test_the_ray_runner_isolates_failures_too(study, tmp_path, monkeypatch):
    """Against the four calls of Ray that it makes; the cluster is Ray's own business."""
    ray = types.ModuleType("ray")
    ray.init = lambda **_: None
    ray.remote = lambda f: types.SimpleNamespace(remote=lambda *a: f(*a))
    ray.wait = lambda refs: (refs[:1], refs[1:])
    ray.get = lambda refs: refs
    monkeypatch.setitem(sys.modules, "ray", ray)
    outcomes = run_all([point("a", fail=True), point("b")], tmp_path, "ray")
    assert [(o.name, o.status) for o in outcomes] == [("a", "failed"), ("b", "done")]
