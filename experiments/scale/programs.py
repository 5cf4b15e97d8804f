"""Whole models compiled for TPU slices that are not here, and what they take of each chip.

Weights are shapes alone. A program that does not fit is a result too: the compiler says how much it
would have needed. "Compiled, not run" holds for all of it.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from experiments.lclm import training
from kvjax.models.config import DecoderConfig, LayerConfig, RopeConfig, tensor_shapes
from kvjax.models.decoder import Decoder, cache_spec, step_aligned, unembed
from kvjax.models.sharding import abstract_decoder, cache_shardings, decoder_shardings
from kvjax.soft import LCLM, Batch, SoftConfig, new_model
from kvjax.soft.adapter import TEXT
from kvjax.soft.encoder import encode
from kvjax.soft.layout import Windows
from kvjax.train import take_apart
from kvjax.train.sharding import batch_shardings, param_shardings, state_shardings
from kvjax.train.step import first_state, make_step


def qwen3(layers: int, hidden: int, mlp: int, heads: int, vocabulary: int) -> DecoderConfig:
    """A decoder of Qwen3's kind with 8 KV heads of 128."""
    layer = LayerConfig(rope=RopeConfig(theta=1e6))
    return DecoderConfig(
        family="qwen3", vocab_size=vocabulary, hidden_size=hidden, intermediate_size=mlp,
        num_heads=heads, num_kv_heads=8, head_dim=128, layers=(layer,) * layers, context=1 << 20,
        qk_norm=True,
    )  # fmt: skip


QWEN3_4B = qwen3(36, 2560, 9728, 32, 151936)
QWEN3_EMBEDDING = qwen3(28, 1024, 3072, 16, 151669)


class Slice(NamedTuple):
    """A topology by its name, and its chips."""

    name: str
    devices: Sequence[Any]


def tpu_slice(name: str) -> Slice:
    """Such as `v5e:2x2`; ValueError where libtpu is missing or does not know the name."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu waits for a cloud's answer
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:  # whatever libtpu raises
        raise ValueError(
            f"topology {name!r}: {str(error).splitlines()[0]}; give one that libtpu knows, such as "
            "v5e:2x2, v6e:4x4 or v5p:2x2x1 (pip install -c constraints.txt libtpu)"
        ) from error
    return Slice(name, found.devices)


def compiled(program: Any, *arguments: Any) -> dict[str, Any]:
    """What a jitted program takes of each chip, in bytes; `fits` False where it is too much.

    `arguments` are shapes with shardings.
    """
    start = time.perf_counter()
    lowered = program.trace(*arguments).lower(lowering_platforms=("tpu",))
    middle = time.perf_counter()
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        found = _needed(str(error), sum(map(_share, jax.tree.leaves(arguments))))
        return {"fits": False, "lower_seconds": round(middle - start, 1), **found}
    return {
        "fits": True,
        "peak_bytes": memory.peak_memory_in_bytes,
        "lower_seconds": round(middle - start, 1),
        "compile_seconds": round(time.perf_counter() - middle, 1),
        "arguments_bytes": memory.argument_size_in_bytes,
        "outputs_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


def _share(leaf: Any) -> int:
    """Bytes of an argument on one chip."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_TOO_LARGE = (
    rf"Used {_SIZE} of {_SIZE} hbm",
    rf"temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)",
)


def _needed(message: str, arguments: int) -> dict[str, Any]:
    """The compiler's own figures where a program does not fit; any other error goes on.

    It may tell of the temporaries alone; then the arguments' bytes are added.
    """
    for pattern in _TOO_LARGE:
        if found := re.search(pattern, message):
            used, unit, there, unit_there = found.groups()
            size = int(float(used) * _UNITS[unit])
            return {
                "peak_bytes": size + (arguments if "temporaries" in pattern else 0),
                "arguments_bytes": arguments,
                "available_bytes": int(float(there) * _UNITS[unit_there]),
            }
    raise RuntimeError(message)


def abstract(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings in place of arrays."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def decoder_step(
    where: Slice, config: DecoderConfig, transform: Any, tokens: int, capacity: int, batch: int = 1
) -> dict[str, Any]:
    """`tokens` new tokens a row over a cache of `capacity`, bfloat16, split by head over all chips.

    One token is a decoding step; more are a chunk of a prefill, of which the last one's logits are
    wanted.
    """
    mesh = Mesh(np.array(where.devices), ("model",))
    graph, state = abstract_decoder(config)
    cache = jax.eval_shape(lambda: transform.init(cache_spec(config, "bfloat16"), batch, capacity))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def step(state: Any, tokens: Array, cache: Any) -> tuple[Array, Any]:
        model = nnx.merge(graph, state)
        hidden, _, cache = step_aligned(model, tokens, cache, None, False)
        return unembed(model, model.norm(hidden[:, -1:])), cache

    return compiled(
        jax.jit(step, donate_argnums=2),
        abstract(state, decoder_shardings(state, config, mesh)),
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32, sharding=everywhere),
        abstract(cache, cache_shardings(cache, mesh)),
    )


def encoder_pass(where: Slice, soft: SoftConfig, count: int) -> dict[str, Any]:
    """`count` encoder windows and the adapter behind them, bfloat16, windows split over chips.

    Encoder and adapter are on every chip; the decoder's weights, split by head, wait beside them.
    """
    mesh = Mesh(np.array(where.devices), ("model",))
    graph, state = nnx.split(nnx.eval_shape(lambda: _compressor(soft)))

    def run(state: Any, windows: Windows) -> Array:
        model = nnx.merge(graph, state)
        z = encode(model.encoder, windows, soft)
        return model.adapter(z, jnp.full(z.shape[:2], TEXT))

    everywhere, rows = (NamedSharding(mesh, PartitionSpec(*x)) for x in ((), ("model",)))
    places = jax.tree.map(lambda _: everywhere, state)
    places["decoder"] = decoder_shardings(state["decoder"], QWEN3_4B, mesh)
    shapes = windows_shapes(soft, (count,))
    found = compiled(
        jax.jit(run, out_shardings=rows, keep_unused=True),
        abstract(state, places),
        abstract(shapes, jax.tree.map(lambda _: rows, shapes)),
    )
    own = (leaf.size * leaf.dtype.itemsize for n in ("encoder", "adapter") for leaf in
           jax.tree.leaves(state[n]))  # fmt: skip
    return found | {"weights_bytes": sum(own)}


def _compressor(soft: SoftConfig) -> LCLM:
    """The 0.6B + 4B model in bfloat16, to be made under `eval_shape`."""

    def stack(config: DecoderConfig) -> Decoder:
        weights = {k: jnp.zeros(v, "bfloat16") for k, v in tensor_shapes(config).items()}
        return Decoder(config, weights, "bfloat16")

    return new_model(stack(QWEN3_EMBEDDING), stack(QWEN3_4B), soft)


def windows_shapes(soft: SoftConfig, lead: tuple[int, ...]) -> Windows:
    """Shapes of windows with these leading axes."""
    number = jax.ShapeDtypeStruct(lead, jnp.int32)
    tokens = jax.ShapeDtypeStruct((*lead, soft.width), jnp.int32)
    return Windows(tokens, number, number, number, number)


def training_step(where: Slice, recipe: ConfigDict, soft: SoftConfig) -> dict[str, Any]:
    """The end-to-end stage's step as `configs/lclm.py:paper` has it, weights over all chips."""
    held: list[Any] = []

    def build() -> Any:
        model = _compressor(soft)
        devices = training.devices_for(recipe, model, where.devices)
        frame, params = take_apart(model, recipe.dtype)
        held.extend([devices, frame])
        return params

    params = jax.eval_shape(build)
    devices, frame = held
    stage = training.stage(recipe, "end_to_end", soft)
    state = jax.eval_shape(lambda params: first_state(params, stage), params)
    places = param_shardings({n: w.shape for n, w in params.items()}, devices.mesh, devices.tensor)
    batch = _batch_shapes(recipe, soft)
    shardings = (
        state_shardings(state, stage, places, devices.mesh),
        batch_shardings(batch, devices.mesh),
    )
    shape = recipe.shape
    objective = training.loss(shape.chunk, shape.recompute, shape.windows_per_pass)
    step = make_step(frame, stage, objective, recipe.dtype, shardings)
    return compiled(step, *map(abstract, (state, batch), shardings))


def _batch_shapes(recipe: ConfigDict, soft: SoftConfig) -> Batch:
    shape = recipe.shape
    whole = jax.ShapeDtypeStruct((shape.micro, shape.rows, shape.length), jnp.int32)
    return Batch(whole, whole, whole, whole, windows_shapes(soft, (shape.micro, shape.windows)))
