"""How a decoder and its cache are laid over several devices: tensor parallelism by head.

One mesh axis, by default `"model"`. Projections into heads and into the MLP are split by output,
those back into the residual stream by input, the embedding by vocabulary, and the cache by KV
head; so a layer's attention and its cache never leave their device. What does not divide is
replicated.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.cache.segments import ModelCache
from kvjax.models.config import DecoderConfig, tensor_shapes
from kvjax.models.decoder import Decoder

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")


def abstract_decoder(config: DecoderConfig, dtype: str = "bfloat16") -> tuple[Any, Any]:
    """`nnx.split` of a decoder whose weights are shapes alone: for compiling without weights."""
    shapes = tensor_shapes(config)

    def build() -> Decoder:
        return Decoder(config, {k: jax.numpy.zeros(v, dtype) for k, v in shapes.items()}, dtype)

    return nnx.split(nnx.eval_shape(build))


def decoder_shardings(state: Any, config: DecoderConfig, mesh: Mesh, axis: str = "model") -> Any:
    """A `NamedSharding` for each leaf of a decoder's state."""
    ways = mesh.shape[axis]
    heads_divide = config.num_heads % ways == 0 and config.num_kv_heads % ways == 0

    def place(path: tuple, leaf: Any) -> NamedSharding:
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        spec = PartitionSpec()
        if "embed_tokens" in names or "lm_head" in names:
            spec = PartitionSpec(axis) if config.vocab_size % ways == 0 else spec
        elif "self_attn" in names and not heads_divide:
            pass
        elif any(n in names for n in _BY_OUTPUT) and leaf.shape[-1] % ways == 0:
            spec = PartitionSpec(*[None] * (leaf.ndim - 1), axis)
        elif any(n in names for n in _BY_INPUT) and "kernel" in names and leaf.shape[0] % ways == 0:
            spec = PartitionSpec(axis)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, state)


def cache_shardings(cache: ModelCache, mesh: Mesh, axis: str = "model") -> Any:
    """A `NamedSharding` for each leaf of a cache: layers by KV head, the rest replicated."""
    ways = mesh.shape[axis]

    def place(leaf: Any) -> NamedSharding:
        by_head = leaf.ndim >= 3 and leaf.shape[1] % ways == 0
        return NamedSharding(mesh, PartitionSpec(None, axis) if by_head else PartitionSpec())

    return jax.tree.map(place, cache)
