"""What a model's cache must hold: streams with roles, a layer, a whole model.

A *stream* is one named array per token of a layer. Ordinary attention has two, `k` (a key) and
`v` (a value); a latent cache has `c` (both) and `k_rope` (a key). Nothing below this file knows
which kind of attention filled a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.ops.partials import Scoring

ROLES = ("key", "value", "both")


@dataclass(frozen=True)
class StreamSpec:
    """One named per-token array of a layer.

    Attributes:
      name: the stream's name, such as `"k"`.
      heads: K, how many heads the stream has.
      dim: D, elements per head.
      role: `"key"` enters the scores, `"value"` the output, `"both"` both.
    """

    name: str
    heads: int
    dim: int
    role: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"StreamSpec.role is {self.role!r}; use one of {ROLES}")
        if self.heads < 1 or self.dim < 1:
            raise ValueError(f"stream {self.name!r}: heads and dim must be at least 1")

    @property
    def is_key(self) -> bool:
        return self.role in ("key", "both")

    @property
    def is_value(self) -> bool:
        return self.role in ("value", "both")

    @property
    def encode_role(self) -> str:
        """How encoders treat the stream: what enters the scores is encoded as a key."""
        return "key" if self.is_key else "value"


@dataclass(frozen=True)
class LayerSpec:
    """One layer's streams and how its attention reads them.

    Attributes:
      streams: the streams; a key is the concatenation of the key streams in this order.
      num_heads: H, query heads; a multiple of the streams' heads.
      scale: multiplies q·k.
      softcap: Gemma 2's cap, scores become cap·tanh(score / cap) before the mask; None: no cap.
      window: a token sees itself and the window − 1 tokens before it; None: all of them.
      dtype: the dtype of exact entries, `"float32"` or `"bfloat16"`.
    """

    streams: tuple[StreamSpec, ...]
    num_heads: int
    scale: float
    softcap: float | None = None
    window: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"LayerSpec.window is {self.window}; use None or at least 1")
        for stream in self.streams:
            if self.num_heads % stream.heads:
                raise ValueError(
                    f"num_heads {self.num_heads} is not a multiple of the {stream.heads} heads of "
                    f"stream {stream.name!r}"
                )

    @property
    def key_streams(self) -> tuple[StreamSpec, ...]:
        return tuple(s for s in self.streams if s.is_key)

    @property
    def value_streams(self) -> tuple[StreamSpec, ...]:
        return tuple(s for s in self.streams if s.is_value)

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.scale, self.softcap)

    @property
    def key_dim(self) -> int:
        """D of a whole key, and of a query."""
        return sum(s.dim for s in self.key_streams)

    @property
    def kv_heads(self) -> int:
        return self.key_streams[0].heads


@dataclass(frozen=True)
class CacheSpec:
    """A whole model's cache: one `LayerSpec` per layer."""

    layers: tuple[LayerSpec, ...]


def heads_spec(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    dtype: str = "float32",
) -> LayerSpec:
    """The spec of ordinary (MHA, GQA, MQA) attention: streams `k` and `v`, K heads of D each."""
    streams = (
        StreamSpec("k", num_kv_heads, head_dim, "key"),
        StreamSpec("v", num_kv_heads, head_dim, "value"),
    )
    return LayerSpec(streams, num_heads, scale, softcap, window, dtype)
