"""One layer's memory: the controller, the state, and what it adds to the layer's projections.

δ-mem (arXiv 2605.12357 §3). From the attention's input x a controller makes a query, a key, a value
and gates of rank r; a token reads the state at its query, then writes into it by a gated delta
rule; what it read corrects the frozen attention's projections. All of it is float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from kvjax.memory.config import HEADS, DeltaMemConfig
from kvjax.ops.delta_scan.api import delta_scan

EPS = 1e-6


class MemoryParam(nnx.Variable):
    """A trained weight of the memory: no `nnx.Param`, so the frozen model's weights are the
    `nnx.Param`s and nothing else."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MemoryState:
    """One layer's memory of B rows.

    Attributes:
      matrix: [B,N,r,r] float32, rows are values, columns keys.
      gates: [B,2] float32, the sum of the mean write gate over the last chunk's real tokens (or
        messages written) and their number; None: not recorded.
      write: whether chunks write.
    """

    matrix: Array
    gates: Array | None = None
    write: bool = field(default=True, metadata={"static": True})


class Controls(NamedTuple):
    """Of each token: query, key, value [B,T,N,r]; write gate β and ln λ [B,T,N,r] (or 1)."""

    query: Array
    key: Array
    value: Array
    beta: Array
    log_keep: Array


class DeltaMemory(nnx.Module):
    """The memory beside one layer's attention (`kvjax.models.blocks.Beside`).

    Args:
      config: the adapter's.
      tensors: its weights, [out, in] under the original's names (see `names`).
    """

    def __init__(self, config: DeltaMemConfig, tensors: Mapping[str, Any]) -> None:
        self.config = config

        def param(*names: str) -> MemoryParam:
            parts = [jnp.asarray(tensors[name], jnp.float32) for name in names]
            return MemoryParam(jnp.concatenate(parts).T)  # one product for all of them

        gates = ("beta",) if config.coupled else ("beta", "lambda")
        projections = ("memory_q_proj", "memory_k_proj", "memory_v_proj")
        self.controller = param(*projections, *(f"{gate}_proj" for gate in gates))
        self.bias = param(*(f"{gate}_bias" for gate in gates))
        self.out = nnx.data({h: param(f"delta_{h}_proj") for h in HEADS if h in config.heads})

    def init(self, batch: int) -> MemoryState:
        """An empty memory of `batch` rows, that writes."""
        c = self.config
        return MemoryState(jnp.zeros((batch, c.states, c.rank, c.rank), jnp.float32))

    def frozen(self, state: MemoryState) -> MemoryState:
        """The state, only read."""
        return replace(state, write=False)

    def controls(self, x: Array) -> Controls:
        """x [B,T,E] -> the controls of each token."""
        c, lead = self.config, x.shape[:2]
        y = x.astype(jnp.float32) @ self.controller[...]
        query, key, value, logits = jnp.split(y, [c.width, 2 * c.width, 3 * c.width], -1)
        query, key, value = (a.reshape(*lead, c.states, c.rank) for a in (query, key, value))
        if c.normalized:
            query, key = _unit(jnp.tanh(query)), _unit(jnp.tanh(key))
        logits = (logits + self.bias[...]).reshape(*lead, -1, c.states, c.gates // c.states)
        beta = logits[:, :, 0]
        if c.mode == "no_lambda":
            log_keep = jnp.zeros_like(beta)
        else:  # ln(1 − σ(x)) = ln σ(−x): no cancellation where β is near 1
            log_keep = jax.nn.log_sigmoid(-beta if c.coupled else logits[:, :, 1])
        return Controls(query, key, value, jax.nn.sigmoid(beta), log_keep)

    def __call__(
        self, hidden: Array, length: Array, state: MemoryState, messages: Array | None = None
    ) -> tuple[dict[str, Array], MemoryState]:
        """Corrections of the layer's projections for a chunk, and the memory after it.

        Args:
          hidden: [B,T,E], the attention's input, rows left-aligned.
          length: [B] int32, real tokens; the others neither read nor write.
          state: the memory before the chunk.
          messages: [B,T] int32, the message of each token, −1: none; for `message_mean`.

        Returns:
          "q", "k", "v" or "o" -> [B,T,out] float32, and the state.

        Raises:
          ValueError: where messages are to be written and nobody says which.
        """
        reads, state = self.read(hidden, length, state, messages)
        flat = reads.reshape(*reads.shape[:2], -1) * (self.config.alpha / self.config.rank)
        return {name: flat @ weight[...] for name, weight in self.out.items()}, state

    def read(
        self, hidden: Array, length: Array, state: MemoryState, messages: Array | None = None
    ) -> tuple[Array, MemoryState]:
        """What each token reads [B,T,N,r], and the memory after the chunk."""
        real = jnp.arange(hidden.shape[1]) < length[:, None]
        controls = self.controls(hidden)
        if state.write and self.config.writes == "token":
            reads, after = self._write(state, controls, real)
        else:
            reads = (state.matrix[:, None] * controls.query[..., None, :]).sum(-1)
            after = state.matrix
            if state.write:
                means, real_means = _message_means(hidden, real, messages)
                controls = self.controls(means)
                _, after = self._write(state, controls, real_means)
                return _where(real, reads), self._after(state, after, controls, real_means)
        return _where(real, reads), self._after(state, after, controls, real)

    def _write(self, state: MemoryState, c: Controls, real: Array) -> tuple[Array, Array]:
        outside = self.config.mode == "lambda_outside"
        erase = c.beta * jnp.exp(c.log_keep) if outside else c.beta
        return delta_scan(
            state.matrix, c.query, c.key, _where(real, c.beta * c.value),
            _where(real, c.log_keep), _where(real, erase),
        )  # fmt: skip

    def _after(
        self, state: MemoryState, matrix: Array, c: Controls, real: Array
    ) -> MemoryState:
        if state.gates is None:
            return replace(state, matrix=matrix)
        total = jnp.where(real, c.beta.mean((2, 3)), 0.0).sum(1)
        gates = jnp.stack([total, real.sum(1).astype(jnp.float32)], -1)
        return replace(state, matrix=matrix, gates=gates)

    def tensors(self) -> dict[str, Array]:
        """The weights under the original's names, [out, in]; zeros for heads not corrected are
        the caller's to add."""
        c = self.config
        rows = self.controller[...].T
        gates = ("beta",) if c.coupled else ("beta", "lambda")
        sizes = {f"memory_{n}_proj": c.width for n in "qkv"} | {f"{g}_proj": c.gates for g in gates}
        found, at = {}, 0
        for name, size in sizes.items():
            found[name], at = rows[at : at + size], at + size
        for i, gate in enumerate(gates):
            found[f"{gate}_bias"] = self.bias[...][i * c.gates : (i + 1) * c.gates]
        return found | {f"delta_{h}_proj": weight[...].T for h, weight in self.out.items()}


def _unit(x: Array) -> Array:
    """x / max(|x|, ε); its gradient is that of x / ε where x is 0."""
    square = (x * x).sum(-1, keepdims=True)
    length = jnp.sqrt(jnp.where(square > EPS * EPS, square, 1.0))
    return x / jnp.where(square > EPS * EPS, length, EPS)


def _where(real: Array, x: Array) -> Array:
    """x [B,T,...] where real [B,T], else 0."""
    return jnp.where(real[..., None, None], x, 0.0)


def _message_means(
    hidden: Array, real: Array, messages: Array | None
) -> tuple[Array, Array]:
    """The mean input of each message, in the order of their numbers: [B,T,E] of which [B,T] are
    messages (there are at most T)."""
    if messages is None:
        raise ValueError("messages: memory.writes is 'message_mean'; say which message each token "
                         "belongs to, or turn writes off")  # fmt: skip
    width = hidden.shape[1]

    def one(hidden: Array, number: Array, counts: Array) -> tuple[Array, Array]:
        order = jnp.argsort(jnp.where(counts, number, jnp.iinfo(jnp.int32).max), stable=True)
        ranked = number[order]
        fresh = jnp.concatenate([jnp.zeros(1, bool), ranked[1:] != ranked[:-1]])
        place = jnp.where(counts[order], jnp.cumsum(fresh), width)  # width: dropped
        sums = jax.ops.segment_sum(hidden[order].astype(jnp.float32), place, width)
        sizes = jax.ops.segment_sum(jnp.ones(width), place, width)
        return sums / jnp.maximum(sizes, 1.0)[:, None], sizes > 0

    return jax.vmap(one)(hidden, messages, real & (messages >= 0))
