"""What one layer's memory can hold: key-value pairs written one after the other, then asked for.

No language model: embeddings of keys and of values, the memory of `kvjax.memory` as it stands
beside a layer, and a linear readout, all trained by Adam for each number of pairs. What is not
recalled then, no training of a larger model around this state will recall.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from ml_collections import ConfigDict

from experiments.delta_mem.training import memory_config
from experiments.record import Metrics
from experiments.statistics import mean_interval
from kvjax import memory
from kvjax.data.memory import MQAR, Recall
from kvjax.memory import DeltaMemConfig, MemoryParam
from kvjax.memory.module import DeltaMemory

LOG_EVERY = 50  # steps


class Store(nnx.Module):
    """Writes pairs, then answers queries from its state.

    Args:
      config: the memory's; what corrects "o" beside a layer is the readout here, whatever heads.
      task: how many keys and values there are.
      embed: size of an embedding; a token is a key's beside a value's, a query a key's beside 0.
      seed: of the first weights.
    """

    def __init__(self, config: DeltaMemConfig, task: MQAR, embed: int, seed: int) -> None:
        config, draw = replace(config, heads=("o",)), np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return draw.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

        self.keys, self.values = (
            MemoryParam(jnp.asarray(normal(count, embed))) for count in (task.keys, task.values)
        )
        tensors = {f"memory_{n}_proj": normal(config.width, 2 * embed) for n in "qkv"}
        for gate, sign in (("beta", 1), ("lambda", -1)):
            tensors[f"{gate}_proj"] = np.zeros((config.gates, 2 * embed), np.float32)
            tensors[f"{gate}_bias"] = np.full(config.gates, sign * config.gate_bias, np.float32)
        tensors["delta_o_proj"] = normal(task.values, config.width)
        self.memory = DeltaMemory(config, tensors)

    def __call__(self, keys: Any, values: Any, queries: Any) -> Array:
        """keys, values [B,W], queries [B,Q] int32 -> logits [B,Q,values] float32."""
        batch, writes = keys.shape
        told = jnp.concatenate([self.keys[...][keys], self.values[...][values]], -1)
        state = self.memory.init(batch)
        _, state = self.memory.read(told, jnp.full(batch, writes), state)
        asked = self.keys[...][queries]
        asked = jnp.concatenate([asked, jnp.zeros_like(asked)], -1)
        (quiet,) = memory.writing((state,), False)
        assert quiet is not None
        return self.memory(asked, jnp.full(batch, queries.shape[1]), quiet)[0]["o"]


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """The share of values recalled, by number of pairs."""
    how, found = config.mqar, {}
    with Metrics(folder) as metrics:
        for number, pairs in enumerate(how.pairs):
            overwrites = int(pairs * how.overwritten)
            task = MQAR(pairs, overwrites, how.key_count, how.value_count)
            store = train(config, task, metrics, number * how.steps)
            found[str(pairs)] = recalled(store, task.draw(how.sequences, 2 * config.seed))
    return {
        "scale": {
            "keys": how.key_count, "values": how.value_count, "overwritten": how.overwritten,
            "steps": how.steps, "batch": how.batch, "sequences": how.sequences,
        },
        "cell": config.cell.to_dict(),
        "recalled": found,
    }  # fmt: skip


def train(config: ConfigDict, task: MQAR, metrics: Metrics, begin: int) -> Store:
    """A store trained on sequences of one task; logs its loss from step `begin` on."""
    how = config.mqar
    store = Store(memory_config(config.cell), task, how.embed, config.seed)
    graph, state = nnx.split(store)
    rate = optax.warmup_cosine_decay_schedule(0.0, how.rate, how.steps // 20, how.steps)
    adam = optax.adam(rate)

    def loss(state: nnx.State, batch: Recall) -> Array:
        logits = nnx.merge(graph, state)(batch.keys, batch.values, batch.queries)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.answers).mean()

    @jax.jit
    def step(state: nnx.State, moments: Any, batch: Recall) -> tuple:
        value, gradient = jax.value_and_grad(loss)(state, batch)
        updates, moments = adam.update(gradient, moments)
        return optax.apply_updates(state, updates), moments, value

    moments = adam.init(state)
    for i in range(how.steps):
        batch = task.draw(how.batch, 2 * (config.seed * how.steps + i) + 1)  # odd: held out is even
        state, moments, value = step(state, moments, batch)
        if (i + 1) % LOG_EVERY == 0 or i + 1 == how.steps:
            metrics.write(begin + i, {"loss": float(value), "pairs": task.pairs})
    return nnx.merge(graph, state)


def recalled(store: Store, batch: Recall) -> dict[str, float]:
    """Mean over sequences and its interval; "old" is the share of overwritten values told."""
    said = np.asarray(jax.jit(lambda b: store(b.keys, b.values, b.queries).argmax(-1))(batch))
    right = mean_interval((said == batch.answers).mean(1, keepdims=True))._asdict()
    changed = batch.old >= 0
    old = float((said == batch.old)[changed].mean()) if changed.any() else None
    return right | {"old": old}
