"""One compiled training step: gradients over micro-batches, clipping, AdamW by part, a check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.train.schedule import Part, Stage, learning_rate, members, optimizer
from kvjax.train.state import Frame, Params, TrainState, put_together


class Losses(NamedTuple):
    """What a loss function says of one micro-batch.

    Attributes:
      total: float32, summed over the positions that count.
      counted: int32, how many do.
      seen: what the batch has (bools), for parts that are trained only `when` it does.
    """

    total: Array
    counted: Array
    seen: dict[str, Array]


class Report(NamedTuple):
    """What a step says.

    Attributes:
      loss, gradient_norm: float32; the norm is the one before clipping.
      counted: int32, positions that did.
      bad: int32, the first tensor that is not finite, as `tensor_names` counts; −1: none.
      rates: the learning rate of each part.
    """

    loss: Array
    gradient_norm: Array
    counted: Array
    bad: Array
    rates: dict[str, Array]


Loss = Callable[[Any, Any], Losses]  # of a model and a micro-batch


def first_state(params: Params, stage: Stage) -> TrainState:
    """The state at a stage's start; its optimizers are new."""
    own = members(stage, params)
    states = {
        part.name: optimizer(stage, part).init({n: params[n] for n in own[part.name]})
        for part in stage.parts
    }
    return TrainState(params, states, jnp.zeros((), jnp.int32))


def tensor_names(stage: Stage, params: Params) -> list[str]:
    """What `Report.bad` counts."""
    trained = [name for own in members(stage, params).values() for name in own]
    return ["the loss", *(f"the gradient of {n}" for n in trained), *trained]


def make_step(
    frame: Frame, stage: Stage, loss: Loss, dtype: str = "float32", shardings: Any = None
) -> Callable[[TrainState, Any], tuple[TrainState, Report]]:
    """The step of a stage, jitted; it donates the state.

    Args:
      frame: from `take_apart`, with the same dtype.
      stage: what is trained, and how.
      loss: of a model in `dtype` and one micro-batch.
      dtype: of weights and activations while computing; masters, gradients' sums and the optimizer
        are float32.
      shardings: (of the state, of the batch) where several devices share the work.

    Returns:
      A function of a state and of micro-batches stacked along a leading axis. Their losses are
      summed before the division by what counts, so that many small ones equal one large.
    """
    run = functools.partial(_step, frame, stage, loss, dtype)
    if shardings is None:
        return jax.jit(functools.partial(run, None), donate_argnums=0)
    places = shardings[0]

    def on_mesh(state: TrainState, batch: Any) -> tuple[TrainState, Report]:
        with jax.sharding.use_abstract_mesh(places.step.mesh.abstract_mesh):
            return run(places.params, state, batch)

    return jax.jit(on_mesh, donate_argnums=0, in_shardings=shardings, out_shardings=(places, None))


def _step(
    frame: Frame, stage: Stage, loss: Loss, dtype: str, places: Any, state: TrainState, batch: Any
) -> tuple[TrainState, Report]:
    own = members(stage, state.params)
    trained = {name: state.params[name] for names in own.values() for name in names}
    objective = functools.partial(_objective, frame, loss, dtype, state.params)
    sums, gradients = _gradients(objective, trained, batch, places)
    count = jnp.maximum(sums.counted, 1)
    gradients = jax.tree.map(lambda g: g / count, gradients)
    moves = {p.name: sums.seen[p.when] if p.when else jnp.array(True) for p in stage.parts}
    for part in stage.parts:
        for name in own[part.name]:
            kept = _masked(gradients[name], part)
            gradients[name] = jnp.where(moves[part.name], kept, 0)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in gradients.values()))
    clipped = jax.tree.map(lambda g: g * jnp.minimum(1, stage.clip / (norm + 1e-9)), gradients)
    params, optimizers, rates = dict(state.params), {}, {}
    for part in stage.parts:
        before = {name: state.params[name] for name in own[part.name]}
        mine = {name: clipped[name] for name in before}
        rates[part.name] = learning_rate(stage, part, state.step)
        after = _update(stage, part, mine, state.optimizer[part.name], before, rates[part.name])
        held = (before, state.optimizer[part.name])
        after = jax.tree.map(functools.partial(jnp.where, moves[part.name]), after, held)
        params |= after[0]
        optimizers[part.name] = after[1]
    mean = sums.total / count
    bad = _first_bad([mean, *(gradients[n] for n in trained), *(params[n] for n in trained)])
    report = Report(mean, norm, sums.counted, bad, rates)
    return TrainState(params, optimizers, state.step + 1), report


def _objective(
    frame: Frame, loss: Loss, dtype: str, params: Params, trained: Params, micro: Any
) -> tuple[Array, Losses]:
    found = loss(put_together(frame, params | trained, dtype), micro)
    return found.total, found


def _gradients(
    objective: Callable, trained: Params, batch: Any, places: dict[str, Any] | None
) -> tuple[Losses, Params]:
    """Sums over micro-batches, of losses and of gradients (float32), which lie as their weights."""

    def placed(gradients: Params) -> Params:
        if places is None:
            return gradients
        return {n: jax.lax.with_sharding_constraint(g, places[n]) for n, g in gradients.items()}

    def one(sums: tuple[Losses, Params], micro: Any) -> tuple:
        (_, found), gradients = jax.value_and_grad(objective, has_aux=True)(trained, micro)
        before, summed = sums
        seen = {name: before.seen[name] | has for name, has in found.seen.items()}
        both = Losses(before.total + found.total, before.counted + found.counted, seen)
        return (both, jax.tree.map(jnp.add, summed, placed(gradients))), None

    shape = jax.eval_shape(objective, trained, jax.tree.map(lambda leaf: leaf[0], batch))[1]
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    return jax.lax.scan(one, (start, placed(jax.tree.map(jnp.zeros_like, trained))), batch)[0]


def _masked(gradient: Array, part: Part) -> Array:
    """The gradient of a part's rows alone."""
    if not part.rows:
        return gradient
    return jnp.zeros_like(gradient).at[jnp.array(part.rows)].set(gradient[jnp.array(part.rows)])


def _update(
    stage: Stage, part: Part, gradients: Params, state: Any, params: Params, rate: Array
) -> tuple[Params, Any]:
    updates, state = optimizer(stage, part).update(gradients, state, params)
    moved = {n: params[n] - rate * _masked(updates[n], part) for n in params}
    return moved, state


def _first_bad(tensors: list[Array]) -> Array:
    flags = jnp.stack([~jnp.isfinite(tensor).all() for tensor in tensors])
    return jnp.where(flags.any(), flags.argmax(), -1).astype(jnp.int32)
