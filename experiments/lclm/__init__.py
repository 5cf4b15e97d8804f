"""Soft tokens in small: train a compressor through its four stages, then ask what it kept.

Every arm is a point: its ratios, and whether reconstruction data are in its mixture. A decoder made
from nothing is pre-trained once a workdir. Training goes on where it was after any kill.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments.lclm import report
from experiments.lclm.rows import points, validate

__all__ = ["points", "report", "run_point", "validate"]


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Trains and evaluates one arm; JAX is imported only when there is something to run."""
    from experiments.lclm import run

    return run.run_point(config, folder)
