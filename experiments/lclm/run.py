"""One arm: start, four stages, evaluation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments.lclm import training
from experiments.lclm.evaluate import evaluate
from experiments.lclm.examples import Maker
from experiments.lclm.model import start
from experiments.points import shared_folder
from kvjax.soft import save
from kvjax.train import put_together, take_apart
from kvjax.train.lora import add_lora


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Trains `config.ratios` through the stages and evaluates it; keeps the model if asked to.

    Checkpoints stay until the evaluation is done, so that a kill costs `save_every` steps at most.
    """
    begun = start(config, shared_folder(folder))
    maker = Maker(config.data, begun.words, begun.model.config)
    exact, _ = take_apart(begun.model)
    frame, params = take_apart(begun.model, config.dtype)
    sizes = training.sizes(params)
    if config.model.decoder == "lora":
        params = add_lora(params, training.LORA, config.model.lora_rank, config.seed)
    devices = training.devices_for(config, begun.model)
    fitted = training.train(config, frame, params, maker, begun.corpus.train, folder, devices)
    model = put_together(exact, fitted.params)
    result = {
        "arm": {"ratios": list(config.ratios), "reconstruction": config.reconstruction},
        "scale": _scale(config, sizes, begun.words.vocab_size),
        "quality": evaluate(config, model, maker, begun.corpus.held_out),
        "seconds": {name: round(value, 1) for name, value in fitted.seconds.items()},
    }
    if config.keep_model:
        shutil.rmtree(folder / "model", ignore_errors=True)
        save(model, folder / "model", begun.words, begun.words)
    shutil.rmtree(folder / "checkpoints")
    return result


def _scale(config: ConfigDict, sizes: dict[str, int], vocabulary: int) -> dict[str, Any]:
    positions = config.shape.rows * config.shape.length * config.shape.micro
    steps = {name: config.stages[name].steps for name in training.STAGES}
    return {
        "model": config.model.name or "made here",
        "decoder": config.model.decoder,
        "weights": sizes,
        "vocabulary": vocabulary,
        "window": config.model.window,
        "steps": steps,
        "positions": positions * sum(steps.values()),
        "documents": config.evaluate.documents,
        "questions": config.evaluate.questions,
    }
