"""A model as a flat dict of float32 master weights, and what else a run must remember.

Weights by name ("decoder.layers.0.mlp.up_proj.kernel") make parts, shardings, checkpoints and
error messages one-line affairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from kvjax.train.lora import fold

Params = dict[str, Array]


class Frame(NamedTuple):
    """A model without its weights.

    Attributes:
      graph: the modules, computing in the dtype of the training step.
      tree: the structure of their state.
      names: the weights, in the structure's order.
    """

    graph: Any
    tree: Any
    names: tuple[str, ...]


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
      params: float32 master weights by name, trained or not.
      optimizer: for each part of the stage, the state of its optimizer.
      step: int32, steps of the stage so far.
    """

    params: Params
    optimizer: dict[str, Any]
    step: Array


def flat(tree: Any) -> dict[str, Any]:
    """The leaves of a model's state, or of a tree of its structure, by name."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _name(path: tuple) -> str:
    keys = (str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
    return ".".join(key for key in keys if key != "value")


def take_apart(model: nnx.Module, dtype: str = "float32") -> tuple[Frame, Params]:
    """A model as a frame that computes in `dtype`, and its float32 weights.

    The weights may be the model's own arrays, and a training step donates: the model is then used
    up.
    """
    own = nnx.merge(*nnx.split(model))  # shares the weights, so that `dtype` changes here alone
    for _, node in nnx.iter_graph(own):
        if isinstance(node, nnx.Module) and hasattr(node, "dtype"):
            node.dtype = jnp.dtype(dtype).name
    graph, state = nnx.split(own)
    tree = jax.tree.structure(state)
    params = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in flat(state).items()}
    return Frame(graph, tree, tuple(params)), params


def put_together(frame: Frame, params: Params, dtype: str = "float32") -> Any:
    """The model again, its weights cast to `dtype`; differentiable with respect to `params`."""
    whole = fold(params)
    leaves = [whole[name].astype(jnp.dtype(dtype)) for name in frame.names]
    return nnx.merge(frame.graph, jax.tree.unflatten(frame.tree, leaves))
