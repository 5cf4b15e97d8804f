"""Where a training step's time goes, and that it is compiled once.

    .venv/bin/python scripts/bench/train_step.py [--steps=100] [--stage=end_to_end]

Trains the tiny compressor of `configs/lclm.py` on its own data for some steps of one stage, from
fresh weights, and prints a JSON line: seconds of the whole loop without the first step and the
checkpoint, of them waiting for the compiled step and making batches, the compiled step's share, and
how many programs were compiled after the first step. Leave the machine alone meanwhile.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict

from configs.lclm import get_config
from experiments.lclm import training, words
from experiments.lclm.examples import Maker
from experiments.lclm.model import fresh, soft_config, tiny_config
from experiments.lclm.rows import points
from kvjax.soft import LCLM, add_memory_rows, new_model
from kvjax.soft.encoder import first_layers
from kvjax.train import fit, take_apart

_STEPS = flags.DEFINE_integer("steps", 100, "steps to time", lower_bound=10)
_STAGE = flags.DEFINE_enum("stage", "end_to_end", list(training.STAGES), "which stage")

compiled: list[float] = []  # when each program was


def model_and_data(config: ConfigDict, folder: Path) -> tuple[LCLM, Any]:
    """A compressor with random weights, and its stream of batches."""
    texts = words.texts(config)
    spoken = words.vocabulary(texts[0], config.model.tiny.vocabulary, folder / "words.json")
    pieces = words.corpus(config, texts, spoken)
    base = fresh(tiny_config(config.model.tiny, spoken.vocab_size, 4096), 0)
    decoder, markers = add_memory_rows(base)
    soft = soft_config(config, markers)
    maker = Maker(config.data, spoken, soft)
    model = new_model(first_layers(base, config.model.encoder_layers), decoder, soft)
    return model, training.batches(config, maker, pieces.train, _STAGE.value, 1)


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(time.perf_counter()) if name == event else None
    )
    config = points(get_config(""))[0].config.copy_and_resolve_references().unlock()
    config.stages[_STAGE.value].update({"steps": _STEPS.value, "warmup": 0})
    with tempfile.TemporaryDirectory() as folder:
        model, batches = model_and_data(config, Path(folder))
        begun: list[float] = []  # of each step, when its batch is asked for

        class Clocked:
            def __next__(self) -> Any:
                begun.append(time.perf_counter())
                return next(batches)

            def get_state(self) -> dict[str, Any]:
                return batches.get_state()

        frame, params = take_apart(model)
        plan = training.stage(config, _STAGE.value, model.config)
        objective = training.loss(config.shape.chunk, config.shape.recompute)
        fitted = fit(frame, params, [plan], objective, lambda _: Clocked(), Path(folder) / "run",
                     save_every=_STEPS.value)  # fmt: skip
        end = time.perf_counter()
    seconds, loop = fitted.seconds, end - begun[1] - fitted.seconds["save"]
    print(json.dumps({
        "stage": _STAGE.value, "steps": _STEPS.value - 1, "loop_seconds": round(loop, 3),
        "step_seconds": round(seconds["step"], 3), "data_seconds": round(seconds["data"], 3),
        "compiled_step_share": round(seconds["step"] / loop, 4),
        "programs_after_the_first_step": sum(begun[1] < at < begun[-1] for at in compiled),
    }))  # fmt: skip


if __name__ == "__main__":
    app.run(main)
