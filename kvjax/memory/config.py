"""What a delta-mem adapter is made of, and its translation from and to `delta_mem_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEADS = ("q", "k", "v", "o")
MODES = ("standard", "lambda_outside", "no_lambda")
WRITES = ("token", "message_mean")
INITS = ("base_slice_fixed", "base_slice", "zero")


@dataclass(frozen=True)
class DeltaMemConfig:
    """δ-mem (arXiv 2605.12357): a matrix of rank² numbers a layer beside a frozen model.

    Attributes:
      rank: r; a state is r × r.
      alpha: corrections are scaled by alpha / rank.
      states: N, states of a layer, each with its own projections.
      writes: "token", every real token; "message_mean", once a message, from the mean of its
        tokens' inputs, and then the whole forward pass reads the state before it.
      heads: which projections are corrected, of "q", "k", "v" (before their norms) and "o".
      row_gates: a gate of each row of the state; False: one for the state.
      coupled: λ = 1 − β; False: λ has its own projection.
      mode: keep, erase, write = λ, β, β ("standard"); λ, λβ, β ("lambda_outside", Gated
        DeltaNet's); 1, β, β ("no_lambda", DeltaNet's).
      normalized: q and k are l2(tanh(·)); False: as projected.
      layers: indices of the layers that have a memory; empty: all.
      gate_bias: initial bias of β (and of λ where it is its own).
      init: first values of the corrections: the first columns of the frozen projection, each of
        unit length, times `gain` ("base_slice_fixed": `init_width` columns at most, others 0;
        "base_slice": as many as there are), or "zero".
      gain, init_width: see init.

    Raises:
      ValueError: naming the field.
    """

    rank: int = 8
    alpha: float = 16.0
    states: int = 1
    writes: str = "token"
    heads: tuple[str, ...] = ("q", "o")
    row_gates: bool = True
    coupled: bool = True
    mode: str = "standard"
    normalized: bool = True
    layers: tuple[int, ...] = ()
    gate_bias: float = -1.5
    init: str = "base_slice_fixed"
    gain: float = 0.05
    init_width: int = 8

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("writes", WRITES), ("init", INITS)):
            if getattr(self, name) not in known:
                raise ValueError(f"memory.{name} is {getattr(self, name)!r}; use one of {known}")
        for name in ("rank", "states", "init_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"memory.{name} is {getattr(self, name)}; use 1 or more")
        if not self.heads or len(set(self.heads)) < len(self.heads) or set(self.heads) - {*HEADS}:
            raise ValueError(f"memory.heads is {self.heads}; use some of {HEADS}, each once")

    @property
    def width(self) -> int:
        """Numbers that a layer reads for a token: N · r."""
        return self.states * self.rank

    @property
    def gates(self) -> int:
        """Gates of a layer."""
        return self.width if self.row_gates else self.states

    def has(self, layer: int, count: int) -> bool:
        """Whether layer `layer` of `count` has a memory."""
        return not self.layers or layer in {i % count for i in self.layers}


_FIELDS = {
    "rank": "rank", "alpha": "alpha", "states": "num_state_heads", "mode": "state_update_mode",
    "writes": "memory_write_granularity", "row_gates": "rankwise_gates",
    "coupled": "couple_lambda", "normalized": "normalize_qk", "gate_bias": "beta_bias_init",
    "init": "output_init", "gain": "online_gain", "init_width": "base_slice_ref_width",
}  # fmt: skip
_LISTS = {"heads": "delta_heads", "layers": "target_layers"}
# Parts of the original that have no counterpart here, with the value that turns them off.
_OFF = {
    "num_memory_partitions": 1, "num_global_memory_partitions": 0, "memory_reader_layers": [],
    "memory_readout_mode": "delta", "memory_write_source": "learned_hidden",
    "latent_memory_layers": [], "target_modules": ["self_attn"], "delta_o_rmsnorm": False,
    "trainable_delta_scale": False,
}  # fmt: skip


def config_from_json(data: Mapping[str, Any]) -> DeltaMemConfig:
    """Reads the object of a `delta_mem_config.json`.

    Raises:
      ValueError: for a setting that is not supported, naming its key.
    """
    for key, off in _OFF.items():
        if data.get(key, off) != off:
            raise ValueError(f"{key}: {data[key]!r} is not supported; only {off!r} is")
    given = {name: data[key] for name, key in _FIELDS.items() if key in data}
    given |= {name: tuple(data[key]) for name, key in _LISTS.items() if key in data}
    defaults = DeltaMemConfig()
    for name, value in given.items():
        kind = type(getattr(defaults, name))
        fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if not fits and not (kind is float and type(value) is int):
            raise ValueError(f"{ {**_FIELDS, **_LISTS}[name] }: {value!r} is no {kind.__name__}")
    return DeltaMemConfig(**given)


def config_to_json(config: DeltaMemConfig) -> dict[str, Any]:
    """The object that `config_from_json`, and the original, read as the same adapter."""
    data = {key: getattr(config, name) for name, key in _FIELDS.items()}
    return data | {key: list(getattr(config, name)) for name, key in _LISTS.items()} | _OFF
