"""What a 0.6B + 4B soft-token model takes of real TPU slices, compiled ahead of time.

A point is a slice and a method (every context), or a slice and the training step. Programs that
several points need are compiled once a workdir.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments import record
from experiments.points import Point
from experiments.scale import report

__all__ = ["points", "report", "run_point", "validate"]

PARTS = ("inference", "training")


def validate(config: ConfigDict) -> None:
    """`ValueError` naming field and remedy, before anything is compiled."""
    for part in config.parts:
        if part not in PARTS:
            raise ValueError(f"config.parts: {part!r}; choose among {', '.join(PARTS)}")
    inference = config.inference
    for field in ("chunk", "windows", "least"):
        if inference[field] < 1:
            raise ValueError(f"config.inference.{field}={inference[field]}: use 1 or more")
    for name, method in inference.methods.items():
        for context in inference.contexts:
            if context < 1 or method.ratio < 1 or context % method.ratio:
                raise ValueError(
                    f"config.inference.methods.{name}.ratio={method.ratio}: must divide the "
                    f"context {context}"
                )
    if config.training.rows < 1 or config.training.rows_a_chip < 1:
        raise ValueError("config.training.rows and rows_a_chip: use 1 or more")
    _check_rows(config)


def _check_rows(config: ConfigDict) -> None:
    known = {name for part in config.parts for name in config[part].slices}
    for row in config.rows:
        if row not in known:
            raise ValueError(
                f"config.rows: no {row!r} among the slices; choose {', '.join(sorted(known))}"
            )


def points(config: ConfigDict, overridden: Collection[str] = ()) -> list[Point]:
    """Every slice with every method, and every slice of the training step."""
    chosen = {part: [s for s in config[part].slices if not config.rows or s in config.rows]
              for part in config.parts}  # fmt: skip
    found = [
        _inference_point(config, where, name)
        for where in chosen.get("inference", ())
        for name in config.inference.methods
    ]
    return found + [_training_point(config, where) for where in chosen.get("training", ())]


def _inference_point(config: ConfigDict, where: str, name: str) -> Point:
    own = config.inference.to_dict()
    method = own.pop("methods")[name]
    del own["slices"]
    kept = {"experiment": "scale", "part": "inference", "slice": where}
    return Point(f"{_plain(where)}-{name}", ConfigDict(kept | own | method | {"method": name}))


def _training_point(config: ConfigDict, where: str) -> Point:
    own = config.training.to_dict()
    del own["slices"]
    kept = {"experiment": "scale", "part": "training", "slice": where}
    return Point(f"{_plain(where)}-training", ConfigDict(kept | own))


def _plain(where: str) -> str:
    return where.replace(":", "-")


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Compiles what the point needs; JAX is imported only now."""
    from experiments.scale import run

    def once(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A program's figures, from the workdir if they are there."""
        path = folder.parent.parent / "programs" / f"{_plain(config.slice)}-{name}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            record.write_json(path, make())
        return record.read_json(path)

    part = run.inference if config.part == "inference" else run.training
    return {"part": config.part, **part(config, once)}
