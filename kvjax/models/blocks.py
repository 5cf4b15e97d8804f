"""The readable pieces of a decoder layer, in Flax NNX. Each family is a choice among them.

Attribute names follow Hugging Face's tensor names, so that a path in the module tree is the name
in the file. Linear kernels are stored [in, out] (Hugging Face stores [out, in]).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from kvjax.cache.attend import rope
from kvjax.cache.segments import Chunk
from kvjax.cache.spec import LayerSpec, heads_spec
from kvjax.models.config import DecoderConfig, LayerConfig

Tensors = Mapping[str, Any]  # NumPy arrays, memory-mapped ones, or JAX arrays
Added = Mapping[str, Array]  # "q", "k", "v", "o" -> what is added to that projection, [B,T,out]
NOTHING: Added = {}


class Beside(Protocol):
    """A module beside a layer's attention, with a state of its own (delta-mem, say).

    A block holds it as `beside`, an `nnx.Module`; None, and nothing of it is in any program.
    """

    def init(self, batch: int) -> Any:
        """The state of `batch` rows before their first token, a pytree."""

    def frozen(self, state: Any) -> Any:
        """The state as one that a chunk reads and does not change."""

    def __call__(
        self, hidden: Array, length: Array, state: Any, messages: Array | None
    ) -> tuple[Added, Any]:
        """What a chunk adds to the layer's projections, and the state after the chunk.

        hidden [B,T,E] is the attention's input; length [B] int32, the real tokens of each row;
        messages [B,T] int32, the message of each token (−1: none), or None where nobody said.
        """


class Linear(nnx.Module):
    """y = x @ kernel (+ bias); kernel [in, out]."""

    def __init__(self, tensors: Tensors, name: str, dtype: str, bias: bool = False) -> None:
        self.kernel = nnx.Param(to_array(tensors[f"{name}.weight"], dtype, transpose=True))
        self.bias = nnx.Param(to_array(tensors[f"{name}.bias"], dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        y = few_rows(x, lambda x: x @ self.kernel[...])
        return y if self.bias is None else y + self.bias[...]


def few_rows(x: Array, product: Callable[[Array], Array]) -> Array:
    """`product(x)` for x [B,T,E], with at least 8 rows in 16 bits.

    XLA's CPU backend has a fast 16-bit product from 8 rows on; below, it takes ten times as long
    as float32. Accelerators round rows up to 8 or more in any case.
    """
    rows = x.shape[0] * x.shape[1]
    if rows >= 8 or x.dtype == jnp.float32:
        return product(x)
    wide = jnp.pad(x.reshape(1, rows, -1), ((0, 0), (0, 8 - rows), (0, 0)))
    return product(wide)[0, :rows].reshape(*x.shape[:2], -1)


class RMSNorm(nnx.Module):
    """x / rms(x) · (offset + weight), in float32; over the last axis."""

    def __init__(self, tensors: Tensors, name: str, config: DecoderConfig, dtype: str) -> None:
        self.weight = nnx.Param(to_array(tensors[f"{name}.weight"], dtype))
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return (wide * (self.offset + self.weight[...].astype(jnp.float32))).astype(x.dtype)


class Attention(nnx.Module):
    """Projections around a cache's `attend`: MHA, GQA or MQA, with or without RoPE."""

    def __init__(
        self, tensors: Tensors, name: str, config: DecoderConfig, layer: LayerConfig, dtype: str
    ) -> None:
        c = config
        self.q_proj = Linear(tensors, f"{name}.q_proj", dtype, c.qkv_bias)
        self.k_proj = Linear(tensors, f"{name}.k_proj", dtype, c.qkv_bias)
        self.v_proj = Linear(tensors, f"{name}.v_proj", dtype, c.qkv_bias)
        self.o_proj = Linear(tensors, f"{name}.o_proj", dtype, c.o_bias)
        self.q_norm = RMSNorm(tensors, f"{name}.q_norm", c, dtype) if c.qk_norm else None
        self.k_norm = RMSNorm(tensors, f"{name}.k_norm", c, dtype) if c.qk_norm else None
        self.config, self.rope = config, layer.rope

    def inverse_frequencies(self) -> Array | None:
        """The layer's RoPE, [D/2] float32; None for a layer without."""
        if self.rope is None:
            return None
        return jnp.asarray(self.rope.inverse_frequencies(self.config.head_dim)[0])

    def chunk(
        self, hidden: Array, start: Array, length: Array, added: Added = NOTHING
    ) -> Chunk:
        """What T new tokens bring: hidden [B,T,E]; start, length [B] int32."""
        c, (batch, tokens, _) = self.config, hidden.shape
        query, key, value = (
            _plus(project(hidden), added, name).reshape(batch, tokens, heads, c.head_dim)
            for name, project, heads in (
                ("q", self.q_proj, c.num_heads),
                ("k", self.k_proj, c.num_kv_heads),
                ("v", self.v_proj, c.num_kv_heads),
            )
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        turned_query, turned_key = query, key
        frequencies = self.inverse_frequencies()
        if self.rope is not None and frequencies is not None:
            factor = self.rope.inverse_frequencies(c.head_dim)[1]
            position = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)
            angle = position.astype(jnp.float32)[..., None] * frequencies
            cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
            turned_query, turned_key = rope(query, cos, sin), rope(key, cos, sin)
        entries = {"k": turned_key.swapaxes(1, 2), "v": value.swapaxes(1, 2)}
        return Chunk(entries, start, length, turned_query, key, hidden, frequencies)

    def project(self, out: Array, dtype: jnp.dtype, added: Added = NOTHING) -> Array:
        """[B,T,H,D] -> [B,T,E]."""
        return _plus(self.o_proj(out.astype(dtype).reshape(*out.shape[:2], -1)), added, "o")


def _plus(x: Array, added: Added, name: str) -> Array:
    return x + added[name].astype(x.dtype) if name in added else x


class MLP(nnx.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, tensors: Tensors, name: str, config: DecoderConfig, dtype: str) -> None:
        self.gate_proj = Linear(tensors, f"{name}.gate_proj", dtype, config.mlp_bias)
        self.up_proj = Linear(tensors, f"{name}.up_proj", dtype, config.mlp_bias)
        self.down_proj = Linear(tensors, f"{name}.down_proj", dtype, config.mlp_bias)
        self.activation = config.activation

    def __call__(self, x: Array) -> Array:
        act = jax.nn.silu if self.activation == "silu" else _gelu_tanh
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


class Block(nnx.Module):
    """One decoder layer: attention and MLP, each between norms and a residual."""

    def __init__(
        self, tensors: Tensors, name: str, config: DecoderConfig, layer: LayerConfig, dtype: str
    ) -> None:
        def norm(which: str) -> RMSNorm:
            return RMSNorm(tensors, f"{name}.{which}", config, dtype)

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Attention(tensors, f"{name}.self_attn", config, layer, dtype)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp = MLP(tensors, f"{name}.mlp", config, dtype)
        sandwich = config.sandwich_norms
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm") if sandwich else None
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm") if sandwich else None
        self.beside: Any = None  # a `Beside`

    def correct(
        self, x: Array, length: Array, state: Any, messages: Array | None
    ) -> tuple[Added, Any]:
        """What the module beside the attention adds, and its state after the chunk."""
        if self.beside is None:
            return NOTHING, state
        if state is None:
            raise ValueError("cache: it holds no state for the module beside the model's layers; "
                             "make it by init_cache(model, ...) of this model")  # fmt: skip
        return self.beside(self.input_layernorm(x), length, state, messages)

    def chunk(self, x: Array, start: Array, length: Array, added: Added = NOTHING) -> Chunk:
        """The layer's new entries and queries from the residual stream x [B,T,E]."""
        return self.self_attn.chunk(self.input_layernorm(x), start, length, added)

    def combine(self, x: Array, out: Array, added: Added = NOTHING) -> Array:
        """The residual stream after the layer, given attention's output [B,T,H,D]."""
        attended = self.self_attn.project(out, x.dtype, added)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


def layer_spec(config: DecoderConfig, layer: LayerConfig, dtype: str) -> LayerSpec:
    """What the cache must hold for one layer."""
    return heads_spec(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
        window=layer.window,
        dtype=dtype,
    )


def to_array(tensor: np.ndarray | Array, dtype: str, transpose: bool = False) -> Array:
    """A tensor of a file as a device array of `dtype`; converts one tensor at a time."""
    if isinstance(tensor, jax.Array):  # already on a device, or abstract
        return jnp.matrix_transpose(tensor).astype(dtype) if transpose else tensor.astype(dtype)
    host = np.ascontiguousarray(tensor.T) if transpose else np.asarray(tensor)
    # A copy: the file behind a memory-mapped tensor may change later.
    return jnp.array(host.astype(jnp.dtype(dtype), copy=False))
