"""A memory of fixed size beside a frozen model (delta-mem): trained in small, with its controls.

`config.part` says what is measured:

- `"arms"`: every arm on held-out episodes of every benchmark: the frozen model, memories, states
  zeroed or of another episode, LoRA on the same data, windows, BM25, soft tokens, each with or
  without the history in view;
- `"ceiling"`: how long a trained memory recalls a fact, and how many pairs a state can hold.

An adapter is trained once a workdir, by the first arm that needs it.
"""

import importlib
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments.delta_mem import report
from experiments.delta_mem.rows import points, validate

__all__ = ["points", "report", "run_point", "validate"]


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Runs one point; JAX is imported only when there is something to run."""
    module = {"arms": "run", "mqar": "mqar"}[config.part]
    part = importlib.import_module(f"experiments.delta_mem.{module}")
    return {"part": config.part, **part.run_point(config, folder)}
