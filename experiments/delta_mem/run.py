"""One arm on one benchmark: the frozen model, its adapter (trained first if need be), the exam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments.delta_mem.evaluate import described, evaluate
from experiments.delta_mem.examples import Writer
from experiments.delta_mem.model import start
from experiments.delta_mem.soft import with_memory_of
from experiments.delta_mem.training import equip, kind
from experiments.points import shared_folder


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Scores of an arm; what the training of its adapter said stands beside them."""
    shared = shared_folder(folder)
    model, words = start(config, shared)
    writer, trained = Writer(words), None
    if config.arm.adapter:
        model, trained = equip(model, writer, config, shared)
    arm = described(config.arm, kind(config.adapter))
    read = with_memory_of(model, config) if "compressor" in config else model
    found = evaluate(config, read, writer, folder)
    return {"label": config.label, "arm": arm, **found, "trained": trained}
