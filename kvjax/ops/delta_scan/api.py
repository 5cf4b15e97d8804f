"""A matrix memory written by a delta rule, token by token: linear in T, fixed in size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.ops.delta_scan import tpu, walk
from kvjax.ops.delta_scan.reference import Rule, Tokens, step
from kvjax.ops.dispatch import choose

NAME = "delta_scan"
CHUNK = 64
SMALL = 1024  # numbers of a state with one gate up to which a CPU walks token by token


def delta_scan(
    state: Array,
    query: Array,
    key: Array,
    value: Array,
    decay: Array,
    erase: Array,
    erase_key: Array | None = None,
    *,
    per: str = "row",
    read: str = "before",
    form: str | None = None,
    chunk: int = CHUNK,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """S_t = λ_t ⊙ S_{t-1} − erase_t ⊙ (S_{t-1} e_t) k_tᵀ + v_t k_tᵀ, and reads S q.

    A token with decay 0, erase 0 and value 0 leaves the state as it is: that is how padding is
    kept out. Differentiable once, in every argument; the gradient keeps one state a chunk.

    Args:
      state: [B,H,V,K].
      query, key: [B,T,H,K].
      value: [B,T,H,V], with its write gate multiplied in.
      decay: ln λ ≤ 0, finite; [B,T,H,1], or [B,T,H,V] or [B,T,H,K] as `per` says.
      erase: [B,T,H,1] or [B,T,H,V]; it meets the state before λ.
      erase_key: [B,T,H,K], e; None: the key.
      per: "row" (λ of value rows, delta-mem, Gated DeltaNet) or "key" (of key channels, KDA).
      read: "before" (S_{t-1} q_t, delta-mem) or "after" (S_t q_t) the token's own write.
      form: "recurrent", "chunked", or None: by shape and backend. One token is always one step.
        Where the kernel is asked for, the form of the gradient.
      chunk: C, tokens of a chunk, a power of two.
      implementation: None, "reference" or "tpu" (see `kvjax.ops.dispatch.choose`): the kernel for
        small states. None also leaves large states to the chunked form's matrix products.

    Returns:
      reads [B,T,H,V] and the final state [B,H,V,K], float32.

    Raises:
      ValueError: for shapes that do not fit, or an unknown per, read, form or implementation.
    """
    _check(state, query, key, value, decay, erase, erase_key, per, read, form, chunk)
    rule, given = Rule(per, read), Tokens(query, key, value, decay, erase, erase_key)
    state, tokens = jax.tree.map(lambda x: x.astype(jnp.float32), (state, given))
    refusals = {"tpu": lambda: tpu.refusal(rule, state, tokens)}
    chosen = choose(NAME, implementation, refusals, (state, tokens))
    kernel = chosen == "tpu" and (not form or bool(implementation))
    if query.shape[1] == 1 and implementation is None:
        final, reads = step(rule, state, jax.tree.map(lambda x: x[:, 0], tokens))
        return reads[:, None], final
    by_time = jax.tree.map(lambda x: x.swapaxes(0, 1), tokens)
    chunk = min(chunk, 1 << (query.shape[1] - 1).bit_length())  # short runs are not padded to 64
    chunk = max(chunk, 8) if kernel else chunk
    gates = max(erase.shape[-1], decay.shape[-1])
    if form is None:
        # Behind the kernel it is the gradient's: V systems a chunk take minutes to compile.
        best = best_form(jax.default_backend(), state.shape[2] * state.shape[3], gates)
        form = "recurrent" if kernel else best
    final, reads = walk.scan(walk.Walk(rule, form, chunk, kernel), state, by_time)
    return reads.swapaxes(0, 1), final


def best_form(backend: str, numbers: int, gates: int) -> str:
    """The faster form: see `scripts/bench/delta_scan.py`.

    A loop over tokens wins where a step costs no launch, on CPUs, if the state is small or each row
    or channel has its own gate; elsewhere matrix products do.

    Args:
      backend: JAX's name.
      numbers: of one state.
      gates: of a token and head.
    """
    return "recurrent" if backend == "cpu" and (numbers <= SMALL or gates > 1) else "chunked"


def _check(
    state: Array, query: Array, key: Array, value: Array, decay: Array, erase: Array,
    erase_key: Array | None, per: str, read: str, form: str | None, chunk: int,
) -> None:  # fmt: skip
    for name, given, known in (
        ("per", per, ("row", "key")),
        ("read", read, ("before", "after")),
        ("form", form, (None, *walk.FORMS)),
    ):
        if given not in known:
            raise ValueError(f"{NAME}: {name}={given!r} is unknown: choose one of {known}")
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"{NAME}: chunk={chunk} is no power of two; use 64, or 16 to 128")
    if query.ndim != 4 or query.shape[1] < 1:
        raise ValueError(f"{NAME}: query has shape {query.shape}; give [B,T,H,K] with T ≥ 1")
    lead, (channels, rows) = query.shape[:3], (query.shape[-1], value.shape[-1])
    widths = {
        "key": (key, {channels}),
        "value": (value, {rows}),
        "decay": (decay, {1, rows if per == "row" else channels}),
        "erase": (erase, {1, rows}),
    }
    if erase_key is not None:
        widths["erase_key"] = (erase_key, {channels})
    for name, (x, allowed) in widths.items():
        if x.shape[:-1] != lead or x.shape[-1] not in allowed:
            last = " or ".join(map(str, sorted(allowed)))
            raise ValueError(f"{NAME}: {name} has shape {x.shape}; give {[*lead]} and {last} last")
    if state.shape != (lead[0], lead[2], rows, channels):
        raise ValueError(f"{NAME}: state has shape {state.shape}; give "
                         f"{(lead[0], lead[2], rows, channels)}")  # fmt: skip
