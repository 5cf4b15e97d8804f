"""An adapter, a memory or LoRA, trained beside the frozen model and kept for every arm that asks.

It lies in the workdir's `shared/adapter-<name>-<key>/`; the key changes with whatever it depends
on. The first point that needs it trains it, others wait for the lock; a killed training goes on
from its last checkpoint, with the very numbers of one that was not killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

from experiments.delta_mem.examples import Writer, batches
from experiments.delta_mem.objective import Objective, loss
from experiments.delta_mem.rows import LAST, lessons
from experiments.points import plain
from experiments.record import read_json, write_json
from kvjax import memory
from kvjax.memory import DeltaMemConfig
from kvjax.models.decoder import Decoder
from kvjax.train import Part, Stage, fit, put_together, take_apart
from kvjax.train.lora import A, add_lora

LORA = r"layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj|o_proj)\."
PATTERNS = {"memory": r"layers\.\d+\.beside\.", "lora": r".*\.lora_"}
WEIGHTS, DONE = "lora.safetensors", "trained.json"
ENDS = 10  # steps at the beginning and at the end whose mean losses are told


class Equipped(NamedTuple):
    """A model with its adapter, and what the training of it said."""

    model: Decoder
    trained: dict[str, Any]


def kind(adapter: ConfigDict) -> str:
    """The kind of an adapter, "memory" or "lora"; "" without one."""
    return next((name for name in PATTERNS if name in adapter), "")


def memory_config(settings: ConfigDict) -> DeltaMemConfig:
    """`ValueError` for a field that a memory does not have."""
    try:
        return DeltaMemConfig(**settings)
    except TypeError as error:
        raise ValueError(f"memory: {error}") from error


def objective(training: ConfigDict) -> Objective:
    return Objective(training.context, training.seen, training.gates, training.gate_weight,
                     training.gate_target, training.recompute)  # fmt: skip


def stages(config: ConfigDict) -> list[Stage]:
    """One for each lesson, and the last."""
    name = kind(config.adapter)

    def stage(lesson: str, t: ConfigDict) -> Stage:
        parts = (Part(name, PATTERNS[name], t.rate),)
        return Stage(lesson, t.steps, parts, t.warmup, t.final_rate, t.clip)

    return [stage(*each) for each in lessons(config.training).items()]


def equip(base: Decoder, writer: Writer, config: ConfigDict, shared: Path) -> Equipped:
    """`base` with `config.adapter`, trained first if it is not there yet.

    Args:
      base: the frozen model; it stays as it is.
      writer: its text.
      config: of a point: adapter, training, model, dtype, seed.
      shared: the workdir's folder of shared things.
    """
    folder = shared / f"adapter-{config.adapter.name}-{_key(config)}"
    with _locked(folder):
        if not (folder / DONE).exists():
            _train(base, writer, config, folder)
    if kind(config.adapter) == "memory":
        model = memory.attach(base, *memory.load_adapter(folder))
    else:
        frame, params = take_apart(base)
        updates = {n: jnp.asarray(w) for n, w in load_file(folder / WEIGHTS).items()}
        model = put_together(frame, params | updates, base.dtype)
    return Equipped(model, read_json(folder / DONE))


def _key(config: ConfigDict) -> str:
    data = plain(config)
    parts = [data[field] for field in ("model", "dtype", "seed", "adapter", "training")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _train(base: Decoder, writer: Writer, config: ConfigDict, folder: Path) -> None:
    """Trains and keeps the adapter alone; `trained.json` comes last."""
    adapter, training = config.adapter, config.training
    parts = list(lessons(training).values())
    model = base
    if kind(adapter) == "memory":
        model = memory.attach(base, memory_config(adapter.memory), seed=config.seed)
    exact, _ = take_apart(model)
    frame, params = take_apart(model, config.dtype)
    if kind(adapter) == "lora":
        params = add_lora(params, LORA, adapter.lora.rank, config.seed)
    # A step uses its weights up, and these are the base model's own.
    params = jax.tree.map(jnp.copy, params)
    fitted = fit(
        frame, params, stages(config), loss(objective(training)),
        lambda i: batches(parts[i], writer, config.seed), folder,
        dtype=config.dtype, save_every=training.save_every,
    )  # fmt: skip
    if kind(adapter) == "memory":
        memory.save_adapter(folder, put_together(exact, fitted.params))
    else:
        kept = {n: np.asarray(w) for n, w in fitted.params.items() if A[:-1] in n}
        save_file(kept, folder / WEIGHTS)
    told = _told(config, fitted.params, folder)
    told["seconds"] = {name: round(value, 1) for name, value in fitted.seconds.items()}
    shutil.rmtree(folder / "checkpoints")
    write_json(folder / DONE, told)


def _told(config: ConfigDict, params: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Sizes, and the mean loss of the last stage's first and last steps."""
    parts = lessons(config.training).values()
    pattern = ".beside." if kind(config.adapter) == "memory" else A[:-1]
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    logged = map(json.loads, lines)
    losses = [each["loss"] for each in logged if each["stage"] == LAST]
    return {
        "weights": sum(int(w.size) for name, w in params.items() if pattern in name),
        "steps": sum(t.steps for t in parts),
        "episodes_seen": sum(t.steps * t.rows * t.micro for t in parts),
        "loss": {"first": float(np.mean(losses[:ENDS])), "last": float(np.mean(losses[-ENDS:]))},
    }
