"""Scalars of a run that may be killed at any step and goes on as if it had not been."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter


class Log:
    """Lines of `metrics.jsonl` and TensorBoard events, one a step.

    Opening it at step k drops what an earlier process wrote of steps from k on: those are run
    again.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["step"] < step]
        scratch = path.with_name(path.name + ".part")
        scratch.write_text("".join(line + "\n" for line in kept), "utf-8")
        os.replace(scratch, path)
        self._file = path.open("a", encoding="utf-8")
        events = str(folder / "tensorboard")
        self._events = SummaryWriter(logdir=events, purge_step=step, write_to_disk=True)

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """One line; what is no number goes into the file alone."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if not isinstance(value, str):
                self._events.add_scalar(name, value, step)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._events.close()


def _lines(path: Path) -> list[str]:
    """Whole lines; a kill may have cut the last one short."""
    if not path.exists():
        return []
    return path.read_text("utf-8").split("\n")[:-1]
