"""Points: the unit that a launch and a sweep run, skip, resume and lose.

A study is a package `experiments.<config.experiment>` with

- `validate(config)`: `ValueError` naming field and remedy, before anything is compiled;
- `points(config, overridden)`: the `Point`s of a launch; `overridden` are dotted paths set by hand;
- `run_point(config, folder) -> dict`: runs one point and returns what goes into `result.json`;
- `report`: a module that says how a result reads (see `table`).

A point owns `points/<name>/{config.json, environment.json, metrics.jsonl, result.json}`. The
result appears last, by rename, so a killed point is never taken for a finished one: it runs again.
"""

import importlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from tqdm import tqdm

from experiments import record


class Point(NamedTuple):
    """One run: `name` is its folder, `config` all that defines it."""

    name: str
    config: ConfigDict


class Outcome(NamedTuple):
    """What became of a point: `status` is "done", "skipped" or "failed"."""

    name: str
    status: str
    error: str = ""


def study(config: ConfigDict) -> ModuleType:
    """The package that runs this config."""
    name = config.get("experiment", "")
    try:
        return importlib.import_module(f"experiments.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"experiments.{name}":
            raise
        raise ValueError(f"config.experiment={name!r}: there is no experiments/{name}") from error


def point_folder(workdir: Path, name: str) -> Path:
    return workdir / "points" / name


def shared_folder(folder: Path) -> Path:
    """Where points of one workdir keep what they share, such as a reference run."""
    return folder.parent.parent / "shared"


def plain(config: ConfigDict) -> dict[str, Any]:
    """The config as JSON would give it back (tuples become lists)."""
    return record.json.loads(config.to_json_best_effort())


def is_done(folder: Path, config: ConfigDict) -> bool:
    """Whether the point has its result; `ValueError` if that came from another config."""
    if not (folder / "result.json").exists():
        return False
    before, now = record.read_json(folder / "config.json"), plain(config)
    if before != now:
        fields = ", ".join(_differences(before, now))
        raise ValueError(
            f"{folder} holds a result of another config (different: {fields}); "
            "use another --workdir or delete that folder"
        )
    return True


def _differences(a: Any, b: Any, path: str = "config") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(set(a) | set(b))
        return [d for k in keys for d in _differences(a.get(k), b.get(k), f"{path}.{k}")]
    return [] if a == b else [path]


def run_in_folder(config: ConfigDict, folder: Path) -> None:
    """Runs one point from its start and leaves its result."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "error.txt").unlink(missing_ok=True)
    record.write_json(folder / "config.json", plain(config))
    record.write_json(folder / "environment.json", record.environment())
    start = time.perf_counter()
    result = study(config).run_point(config, folder)
    seconds = round(time.perf_counter() - start, 1)
    record.write_json(folder / "result.json", {"name": folder.name, "seconds": seconds, **result})


def attempt(point: Point, workdir: Path) -> Outcome:
    """Runs a point; its failure is kept in `error.txt` and goes no further."""
    folder = point_folder(workdir, point.name)
    try:
        run_in_folder(point.config, folder)
    except Exception as error:  # whatever it is, the other points go on
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error.txt").write_text(traceback.format_exc(), "utf-8")
        return Outcome(point.name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(point.name, "done")


def run_all(points: Sequence[Point], workdir: Path, runner: str = "local") -> list[Outcome]:
    """Runs the points that have no result yet; reports each as it ends.

    Args:
      points: with distinct names.
      workdir: on a disk that every worker sees, when the runner is a cluster.
      runner: `"local"`, one after another in this process, or `"ray"`.
    """
    _check_names(points)
    todo = [p for p in points if not is_done(point_folder(workdir, p.name), p.config)]
    outcomes = [Outcome(p.name, "skipped") for p in points if p not in todo]
    if outcomes:
        print(f"{len(outcomes)} of {len(points)} points have their result already", flush=True)
    bar = tqdm(total=len(todo), desc="points", unit="point", disable=None)
    for outcome in RUNNERS[runner](todo, workdir):
        bar.update()
        note = f"{outcome.status}: {outcome.name}"
        bar.write(note) if not bar.disable else print(note, flush=True)
        outcomes.append(outcome)
    bar.close()
    return outcomes


def _check_names(points: Sequence[Point]) -> None:
    names = [point.name for point in points]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two points are called {name!r}; give the rows distinct names")
        if not name or "/" in name or name.startswith("."):
            raise ValueError(
                f"point name {name!r}: it becomes a folder, so no '/' and no leading '.'"
            )


def _local(points: Sequence[Point], workdir: Path) -> Iterator[Outcome]:
    yield from (attempt(point, workdir) for point in points)


def _ray(points: Sequence[Point], workdir: Path) -> Iterator[Outcome]:
    """One task a point on the Ray cluster that `RAY_ADDRESS` names, or on this machine."""
    try:
        import ray
    except ImportError as error:
        raise ValueError("--runner=ray: Ray is not installed; pip install 'kvjax[ray]'") from error
    ray.init(ignore_reinit_error=True)
    task = ray.remote(attempt)
    waiting = [task.remote(point, workdir.resolve()) for point in points]
    while waiting:
        ready, waiting = ray.wait(waiting)
        yield from ray.get(ready)


RUNNERS: dict[str, Callable[..., Iterator[Outcome]]] = {"local": _local, "ray": _ray}


def finish(outcomes: Sequence[Outcome]) -> int:
    """Lists the failures and returns the exit code."""
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        print(f"FAILED {outcome.name}: {outcome.error} (see its error.txt)", flush=True)
    return 1 if failed else 0
