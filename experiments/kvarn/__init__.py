"""Fewer bits per entry over long texts: KVarN, its peers, and what they lose while decoding.

`config.part` says what is measured:

- `"drift"`: every row of the grid in the decoding regime, as in `head_to_head`, over long texts;
- `"paired"`: a few rows beside the exact cache, layer by layer: errors of attention's outputs and
  of stored keys, in the decoding regime and with an exact past that is encoded once (static);
- `"retrieval"`: lines, passkeys and needles read through the cache;
- `"paper"`: the paper's own setting, for those who have its models and data.
"""

import importlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments.kvarn import report, rows
from experiments.points import Point

__all__ = ["dry_run", "points", "report", "run_point", "validate"]


def validate(config: ConfigDict) -> None:
    """`ValueError` naming field and remedy, before a model is read or anything compiled."""
    if config.part == "paper":
        from experiments.kvarn import paper

        return paper.validate(config)
    rows.validate(config)


def points(config: ConfigDict, overridden: Collection[str] = ()) -> list[Point]:
    """The points of `config.part`."""
    if config.part == "paper":
        from experiments.kvarn import paper

        return paper.points(config, overridden)
    return rows.points(config)


def dry_run(config: ConfigDict, chosen: Sequence[Point]) -> list[str]:
    """What would run, and for the paper's setting which files and packages are missing."""
    if config.part == "paper":
        from experiments.kvarn import paper

        return paper.dry_run(config, chosen)
    return [point.name for point in chosen]


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Runs one point; JAX is imported only when there is something to run."""
    part = importlib.import_module(f"experiments.kvarn.{config.part}")
    return {"part": config.part, **part.run_point(config, folder)}
