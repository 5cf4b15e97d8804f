"""A memory attached to a decoder, and the states of its layers inside a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from kvjax.cache.segments import ModelCache
from kvjax.memory.config import HEADS, DeltaMemConfig
from kvjax.memory.module import DeltaMemory, MemoryParam, MemoryState

BESIDE = "beside"  # where a cache keeps the states, in `shared`


def attach(
    model: Any, config: DeltaMemConfig, tensors: Mapping[str, Any] | None = None, seed: int = 0
) -> Any:
    """A model with a memory beside its layers.

    The frozen weights are shared with `model`, not copied, and `model` stays as it is. Every
    function that takes a model takes this one; `init_cache` gives it a cache with empty states.

    Args:
      model: a `kvjax.Decoder`.
      config: the memory's.
      tensors: its weights by the original's names, `model.layers.{i}.self_attn.{weight}`;
        None: the first values of training.
      seed: of those.

    Raises:
      ValueError: for a layer that the model does not have, or a weight that is missing or of
        another shape.
    """
    count = len(model.layers)
    for i in config.layers:
        if not -count <= i < count:
            raise ValueError(f"memory.layers: there is no layer {i} among {count}")
    new = nnx.merge(*nnx.split(model))  # new modules around the same arrays
    keys = jax.random.split(jax.random.key(seed), count)
    for i, block in enumerate(new.layers):
        block.beside = nnx.static(None)
        if config.has(i, count):
            if tensors is None:
                own = initial(config, block.self_attn, keys[i])
            else:
                own = _of_layer(tensors, i, shapes(config, block.self_attn))
            block.beside = nnx.data(DeltaMemory(config, own))
    return new


def detach(model: Any) -> Any:
    """The model without its memory, around the same arrays."""
    new = nnx.merge(*nnx.split(model))
    for block in new.layers:
        block.beside = nnx.static(None)
    return new


def memory_config(model: Any) -> DeltaMemConfig:
    """The config of the model's memory; ValueError where it has none."""
    for block in model.layers:
        if block.beside is not None:
            return block.beside.config
    raise ValueError("the model has no memory; attach one first")


def shapes(config: DeltaMemConfig, attention: Any) -> dict[str, tuple[int, ...]]:
    """The weights of one layer by name, [out, in]."""
    embed, c = attention.q_proj.kernel.shape[0], config
    found: dict[str, tuple[int, ...]] = {f"memory_{n}_proj": (c.width, embed) for n in "qkv"}
    for gate in ("beta",) if c.coupled else ("beta", "lambda"):
        found |= {f"{gate}_proj": (c.gates, embed), f"{gate}_bias": (c.gates,)}
    for head in HEADS:
        if head in c.heads:
            found[f"delta_{head}_proj"] = (_frozen(attention, head).shape[1], c.width)
    return found


def parameter_count(model: Any) -> int:
    """Numbers that training the memory changes."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, MemoryParam)))


def _frozen(attention: Any, head: str) -> Any:
    return getattr(attention, f"{head}_proj").kernel  # [in, out]


def initial(config: DeltaMemConfig, attention: Any, key: Array) -> dict[str, Array]:
    """The weights before training: projections uniform in ±1/√E, gates by their bias alone, and
    corrections from the frozen projections (`DeltaMemConfig.init`)."""
    found = {}
    for name, shape in shapes(config, attention).items():
        kind = name.partition("_")[0]
        if kind == "memory":
            key, now = jax.random.split(key)
            bound = shape[1] ** -0.5
            found[name] = jax.random.uniform(now, shape, jnp.float32, -bound, bound)
        elif kind == "delta":
            found[name] = _slice(config, _frozen(attention, name[6])[...], shape)
        else:
            value = config.gate_bias if name.endswith("bias") else 0.0
            value = -value if name == "lambda_bias" else value
            found[name] = jnp.full(shape, value, jnp.float32)
    return found


def _slice(config: DeltaMemConfig, frozen: Array, shape: tuple[int, ...]) -> Array:
    """The first columns of the frozen W [out, in], each of unit length, times the gain."""
    out = jnp.zeros(shape, jnp.float32)
    if config.init == "zero":
        return out
    width = min(config.width, frozen.shape[0])
    if config.init == "base_slice_fixed":
        width = min(width, config.init_width)
    columns = frozen[:width].astype(jnp.float32).T
    length = jnp.maximum(jnp.linalg.norm(columns, axis=0), 1e-12)
    return out.at[:, :width].set(columns / length * config.gain)


def _of_layer(
    tensors: Mapping[str, Any], layer: int, wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    found = {}
    for name, shape in wanted.items():
        full = f"model.layers.{layer}.self_attn.{name}"
        if full not in tensors:
            raise ValueError(f"memory weights: {full} is missing")
        if tuple(np.shape(tensors[full])) != shape:
            raise ValueError(
                f"memory weights: {full} has shape {np.shape(tensors[full])}, the model and the "
                f"config want {shape}"
            )
        found[name] = tensors[full]
    return found


def tensors(model: Any) -> dict[str, np.ndarray]:
    """The memory's weights by the original's names, [out, in] float32.

    As in the original's files, projections that are not corrected are there too, as zeros.
    """
    found = {}
    for i, block in enumerate(model.layers):
        if block.beside is None:
            continue
        own = dict(block.beside.tensors())
        for head in HEADS:
            size = _frozen(block.self_attn, head).shape[1]
            own.setdefault(f"delta_{head}_proj", jnp.zeros((size, block.beside.config.width)))
        for name, value in own.items():
            found[f"model.layers.{i}.self_attn.{name}"] = np.ascontiguousarray(value, np.float32)
    return found


# ---- states ------------------------------------------------------------------------------------


def states(cache: ModelCache) -> tuple[MemoryState | None, ...]:
    """The memory of each layer, None for one without; ValueError where the cache holds none."""
    if BESIDE not in cache.shared:
        raise ValueError("cache: it holds no memory; make it by init_cache of a model with one")
    return cache.shared[BESIDE]


def with_states(cache: ModelCache, new: Sequence[MemoryState | None]) -> ModelCache:
    """The cache with other memories."""
    states(cache)
    return replace(cache, shared=cache.shared | {BESIDE: tuple(new)})


def writing(
    held: Sequence[MemoryState | None], on: bool, record: bool = False
) -> tuple[MemoryState | None, ...]:
    """The memories with writes on or off, and gates recorded or not."""

    def one(state: MemoryState) -> MemoryState:
        gates = jnp.zeros((state.matrix.shape[0], 2)) if record else None
        return MemoryState(state.matrix, gates, on)

    return tuple(None if state is None else one(state) for state in held)


def gate_means(held: Sequence[MemoryState | None]) -> Array:
    """The mean write gate of each layer's last chunk, [layers with a memory] float32.

    Over all real tokens of the batch (or messages written); 0 where there were none.
    """
    recorded = [state.gates for state in held if state is not None and state.gates is not None]
    if not recorded:
        raise ValueError("memories: no gates were recorded; use writing(..., record=True)")
    sums = jnp.stack(recorded).sum(1)  # [layers,2]
    return sums[:, 0] / jnp.maximum(sums[:, 1], 1.0)
