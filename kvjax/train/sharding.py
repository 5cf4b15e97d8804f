"""Weights and batches over a mesh with axes "data", "fsdp" and "model".

"model" splits heads, MLP and vocabulary (`kvjax.models.sharding`); "fsdp" splits whatever is left
of each weight and its optimizer's state, and together with "data" the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.train.schedule import Part, Stage, optimizer
from kvjax.train.state import TrainState

AXES = ("data", "fsdp", "model")


def make_mesh(data: int = 1, fsdp: int = 1, model: int = 1, devices: Any = None) -> Mesh:
    """A mesh of data × fsdp × model devices; ValueError where there are fewer."""
    devices = jax.devices() if devices is None else devices
    count = data * fsdp * model
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"mesh: {data} × {fsdp} × {model} devices (data, fsdp, model) of {len(devices)}; "
            "choose sizes whose product is there"
        )
    return Mesh(np.array(devices[:count]).reshape(data, fsdp, model), AXES)


def param_shardings(
    shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, tensor: Mapping[str, NamedSharding]
) -> dict[str, NamedSharding]:
    """Where each weight lives: as `tensor` says (replicated where it says nothing), and its
    largest axis that is still whole and divides over "fsdp"."""
    whole = NamedSharding(mesh, PartitionSpec())
    return {
        name: NamedSharding(mesh, _fsdp(shape, tensor.get(name, whole).spec, mesh.shape["fsdp"]))
        for name, shape in shapes.items()
    }


def _fsdp(shape: tuple[int, ...], spec: PartitionSpec, ways: int) -> PartitionSpec:
    axes = list(spec) + [None] * (len(shape) - len(spec))
    free = [i for i, size in enumerate(shape) if axes[i] is None and size % ways == 0]
    if ways > 1 and free:
        axes[max(free, key=lambda i: shape[i])] = "fsdp"
    return PartitionSpec(*axes)


def state_shardings(
    state: TrainState, stage: Stage, params: Mapping[str, NamedSharding], mesh: Mesh
) -> Any:
    """A `TrainState` of shardings: moments lie beside their weights, counts everywhere."""
    whole = NamedSharding(mesh, PartitionSpec())

    def moments(part: Part) -> Any:
        return optax.tree_utils.tree_map_params(
            optimizer(stage, part), lambda _, name: params[name], state.optimizer[part.name],
            _names(state.optimizer[part.name]), transform_non_params=lambda _: whole,
        )  # fmt: skip

    states = {part.name: moments(part) for part in stage.parts}
    shardings: Any = (dict(params), states, whole)
    return TrainState(*shardings)


def _names(state: Any) -> dict[str, str]:
    """The names of a part's weights as a tree of their structure, found in its first moments."""
    return {name: name for name in state[0].mu}


def batch_sharding(mesh: Mesh, size: int) -> NamedSharding:
    """Of leaves [micro-batches, rows, …]: `size` rows over "data" and "fsdp" where they divide."""
    divides = size % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0
    return NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp") if divides else None))


def batch_shardings(batch: Any, mesh: Mesh) -> Any:
    """`batch_sharding` of every leaf of a stacked batch."""
    return jax.tree.map(lambda leaf: batch_sharding(mesh, leaf.shape[1]), batch)
