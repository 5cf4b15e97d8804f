"""Stages one after another, resumable after any step.

Order of resuming: the newest checkpoint says stage and step; the state is made as the stage begins
and its arrays are replaced; the data iterator is set to where it was; the log forgets later steps.
A killed run then repeats exactly what it had not saved. The clock goes on from the checkpoint too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from kvjax.train.checkpoints import Checkpoints
from kvjax.train.metrics import Log
from kvjax.train.schedule import Stage
from kvjax.train.sharding import batch_shardings, param_shardings, state_shardings
from kvjax.train.state import Frame, Params, TrainState
from kvjax.train.step import Loss, Report, first_state, make_step, tensor_names


class Batches(Protocol):
    """An iterator over stacked micro-batches whose place can be kept as JSON (grain's are such)."""

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


class Fitted(NamedTuple):
    """The weights after the last stage, and where the seconds went: `step` waiting for the compiled
    step, `compile` the first of each stage and process, `data` making batches, `save`. Of a process
    that was killed they count up to its last checkpoint, without the writing of that."""

    params: Params
    seconds: dict[str, float]


class Devices(NamedTuple):
    """A mesh, and what its "model" axis does with each weight (`kvjax.models.sharding`)."""

    mesh: Mesh
    tensor: dict[str, Any]


def fit(
    frame: Frame,
    params: Params,
    stages: Sequence[Stage],
    loss: Loss,
    data: Callable[[int], Batches],
    folder: Path,
    *,
    dtype: str = "float32",
    save_every: int = 200,
    devices: Devices | None = None,
) -> Fitted:
    """Trains through all stages; called again after a kill, it goes on where it was.

    Args:
      frame, params: from `take_apart`; the weights are used up.
      stages: in order; each starts with new optimizers.
      loss: of a model and a micro-batch.
      data: the batches of a stage, from its start.
      folder: of `metrics.jsonl`, TensorBoard events and `checkpoints/`.
      dtype: of computation.
      save_every: steps between checkpoints; the end of a stage is one too.
      devices: None: one device.

    Raises:
      FloatingPointError: at the first value that is not finite; it names stage, step and tensor.
    """
    with Checkpoints(folder / "checkpoints") as saved:
        newest = saved.latest()
        number, place = newest or (0, {"stage": 0, "data": None})
        before = place.get("seconds", {})  # checkpoints without a clock are older
        clock = dict.fromkeys(("compile", "step", "data", "save"), 0.0) | before
        with Log(folder, number) as log:
            for index in range(place["stage"], len(stages)):
                run = _Stage(frame, stages[index], loss, dtype, devices, clock)
                state = run.first(params)
                batches = data(index)
                if newest and index == place["stage"]:
                    state = saved.restore(number, state)
                    batches.set_state(place["data"])
                state = run.through(state, batches, log, number, saved, index, save_every)
                number, params = number + run.done, state.params
    return Fitted(params, clock)


class _Stage:
    """One stage: its compiled step, and the loop around it."""

    def __init__(
        self, frame: Frame, stage: Stage, loss: Loss, dtype: str, devices: Devices | None,
        clock: dict[str, float],
    ) -> None:  # fmt: skip
        self.stage, self.devices, self.clock, self.done = stage, devices, clock, 0
        self._make = lambda shardings: make_step(frame, stage, loss, dtype, shardings)
        self._shardings: TrainState | None = None

    def first(self, params: Params) -> TrainState:
        """The state at the stage's start, laid over the devices."""
        state = first_state(params, self.stage)
        self.names = tensor_names(self.stage, params)
        if self.devices is None:
            return state
        mesh, shapes = self.devices.mesh, {n: w.shape for n, w in params.items()}
        where = param_shardings(shapes, mesh, self.devices.tensor)
        self._shardings = state_shardings(state, self.stage, where, mesh)
        return jax.device_put(state, self._shardings)

    def through(
        self, state: TrainState, batches: Batches, log: Log, number: int, saved: Checkpoints,
        index: int, save_every: int,
    ) -> TrainState:  # fmt: skip
        """The steps that are left, from checkpoint `number` on."""
        begin, step = int(state.step), None
        waiting: Report | None = None
        for at in range(begin, self.stage.steps):
            batch = self._timed("data", lambda: self._laid(next(batches)))
            kind = "step" if step else "compile"
            step = step or self._make(self._both(batch))
            state, report = self._timed(kind, step, state, batch)
            # One step behind: while the host reads, the device already computes the next.
            self._tell(waiting, at - 1, number + at - 1 - begin, log)
            waiting = report
            if (at + 1) % save_every == 0 or at + 1 == self.stage.steps:
                self._tell(waiting, at, number + at - begin, log)
                waiting = None
                place = {"stage": index, "data": batches.get_state(), "seconds": dict(self.clock)}
                self._timed("save", saved.save, number + at + 1 - begin, state, place)
        self.done = self.stage.steps - begin
        return state

    def _both(self, batch: Any) -> Any:
        if self.devices is None:
            return None
        return self._shardings, batch_shardings(batch, self.devices.mesh)

    def _laid(self, batch: Any) -> Any:
        if self.devices is None:
            return jax.device_put(batch)
        return jax.device_put(batch, batch_shardings(batch, self.devices.mesh))

    def _tell(self, report: Report | None, at: int, number: int, log: Log) -> None:
        """Logs a step; FloatingPointError where something of it is not finite."""
        if report is None:
            return
        found = self._timed("step", jax.tree.map, lambda x: x.item(), report)
        if found.bad >= 0:
            raise FloatingPointError(
                f"stage {self.stage.name}, step {at}: {self.names[found.bad]} is not finite"
            )
        values = {"stage": self.stage.name, "loss": found.loss, "positions": found.counted,
                  "gradient_norm": found.gradient_norm}  # fmt: skip
        rates = {f"learning_rate/{name}": rate for name, rate in found.rates.items()}
        log.write(number, values | rates)

    def _timed(self, name: str, run: Callable, *args: Any) -> Any:
        start = time.perf_counter()
        found = run(*args)
        self.clock[name] += time.perf_counter() - start
        return found
