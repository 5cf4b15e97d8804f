"""The adapter: a pooled latent of the encoder becomes a row of the decoder's embedding space."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from kvjax.cache.attend import own_partial
from kvjax.models.blocks import Block, Linear, RMSNorm, Tensors, layer_spec
from kvjax.models.config import DecoderConfig, LayerConfig, tensor_shapes
from kvjax.ops.partials import Visible
from kvjax.soft.config import SoftConfig

TEXT = -1  # the region of a position that holds no soft token


class Adapter(nnx.Module):
    """s = fc2(gelu(fc1(norm(z)))), with an attention layer over a region before or behind it.

    Args:
      config: which adapter.
      encoder, decoder: the configs of the two models it joins.
      tensors: weights by name, [out, in]: `norm.weight`, `fc1.weight`, `fc1.bias`, …, and
        `attention.layers.0.…` for the attention layer, which is one of the encoder's (before) or
        of the decoder's (behind).
      dtype: dtype of weights and computation.
    """

    def __init__(
        self,
        config: SoftConfig,
        encoder: DecoderConfig,
        decoder: DecoderConfig,
        tensors: Tensors,
        dtype: str = "float32",
    ) -> None:
        plain = dataclasses.replace(decoder, norm_eps=1e-6, norm_offset=0.0)
        self.norm = RMSNorm(tensors, "norm", plain, dtype)
        self.fc1 = Linear(tensors, "fc1", dtype, bias=True)
        self.fc2 = Linear(tensors, "fc2", dtype, bias=True)
        self.kind, self.dtype = config.adapter, dtype
        self.side = _side(config, encoder, decoder)
        self.attention = (
            None if self.side is None
            else Block(tensors, "attention.layers.0", self.side, self.side.layers[0], dtype)
        )  # fmt: skip

    def __call__(self, z: Array, region: Array) -> Array:
        """Soft tokens [B,T,E] from latents.

        Args:
          z: [B,T,Dz], latents in decoder order; what stands at other positions does not matter.
          region: [B,T] int32, which region each position belongs to, −1 for none; only the
            attention layer looks at it.
        """
        z = z.astype(jnp.dtype(self.dtype))
        if self.kind == "attn_mlp":
            z = self._attend(z, region)
        s = self.fc2(jax.nn.gelu(self.fc1(self.norm(z)), approximate=False))
        return self._attend(s, region) if self.kind == "mlp_attn" else s

    def _attend(self, x: Array, region: Array) -> Array:
        """One bidirectional layer over each region; RoPE is over consecutive latents."""
        assert self.attention is not None and self.side is not None
        batch, tokens, _ = x.shape
        start, length = jnp.zeros(batch, jnp.int32), jnp.full(batch, tokens, jnp.int32)
        chunk = self.attention.chunk(x, start, length)
        spec = layer_spec(self.side, self.side.layers[0], self.dtype)
        own = own_partial(spec, chunk.query, chunk, Visible(), segments=region)
        return self.attention.combine(x, own.out)

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights by name, [out, in], in this adapter's dtype."""
        found = {}
        for path, leaf in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            *parts, last = (str(p) for p in path)
            value = np.asarray(leaf[...])
            if parts[0] == "attention":
                parts[:1] = ["attention", "layers", "0"]
            if last == "kernel":
                last, value = "weight", np.ascontiguousarray(value.T)
            found[".".join([*parts, last])] = value
        return found


def _side(
    config: SoftConfig, encoder: DecoderConfig, decoder: DecoderConfig
) -> DecoderConfig | None:
    """The config of the attention layer; None where there is none."""
    if config.adapter == "mlp":
        return None
    model = encoder if config.adapter == "attn_mlp" else decoder
    width = config.latent_size(encoder.hidden_size) if model is encoder else model.hidden_size
    layer = LayerConfig(window=None, rope=model.layers[0].rope)
    return dataclasses.replace(model, hidden_size=width, layers=(layer,))


def adapter_shapes(
    config: SoftConfig, encoder: DecoderConfig, decoder: DecoderConfig
) -> dict[str, tuple[int, ...]]:
    """Every weight of an adapter by name, and its shape as stored, [out, in]."""
    z, e = config.latent_size(encoder.hidden_size), decoder.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "norm.weight": (z,), "fc1.weight": (e, z), "fc1.bias": (e,),
        "fc2.weight": (e, e), "fc2.bias": (e,),
    }  # fmt: skip
    side = _side(config, encoder, decoder)
    if side is not None:
        layer = {k: v for k, v in tensor_shapes(side).items() if ".layers." in k}
        shapes |= {k.replace("model.", "attention.", 1): v for k, v in layer.items()}
    return shapes


def initial_adapter(
    config: SoftConfig, encoder: DecoderConfig, decoder: DecoderConfig, seed: int = 0
) -> Mapping[str, Any]:
    """Weights to start training from, float32: matrices uniform in ±1/√inputs (the default of a
    linear layer), biases 0, norms 1."""
    draw, found = np.random.default_rng(seed), {}
    for name, shape in adapter_shapes(config, encoder, decoder).items():
        if len(shape) == 2:
            bound = shape[1] ** -0.5
            found[name] = draw.uniform(-bound, bound, shape).astype(np.float32)
        else:
            found[name] = np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
    return found
