"""Compiles a whole decoder for real TPUs on a machine that has none, and prints what it takes.

    pip install libtpu -c constraints.txt        (or scripts/test with KVJAX_EXTRAS=aot)
    .venv/bin/python scripts/aot_model.py [--topology=v5e:2x2] [--context=131072] [--chunk=512] \
        [--encode=kvarn] [--model=config.json]

One prefill chunk and one decoding step of a 36-layer model of Qwen3-4B's shape (or of any Hugging
Face config.json), bfloat16, weights as shapes alone, sharded by head over the topology's chips:
a JSON line each, with seconds to lower and to compile, and the compiler's memory analysis in bytes
a chip. "Compiled, not run."
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_LOG_DIR="disabled")

import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax.io.hf import load_config
from kvjax.models.config import DecoderConfig, LayerConfig, RopeConfig
from kvjax.models.decoder import cache_spec, step_aligned, unembed
from kvjax.models.sharding import abstract_decoder, cache_shardings, decoder_shardings

_TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x2", "topology string: v5e:2x2, v6e:2x2, …")
_CONTEXT = flags.DEFINE_integer("context", 131072, "the cache's capacity in tokens")
_CHUNK = flags.DEFINE_integer("chunk", 512, "tokens of the prefill chunk")
_BATCH = flags.DEFINE_integer("batch", 1, "rows")
_ENCODE = flags.DEFINE_string("encode", "none", "an encoder's name, with its default arguments")
_MODEL = flags.DEFINE_string("model", None, "a config.json; Qwen3-4B's shape without one")

QWEN3_4B = DecoderConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerConfig(rope=RopeConfig(theta=1e6)),) * 36,
    context=262144,
    qk_norm=True,
)


def abstract(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings in place of arrays."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def compile_step(config: DecoderConfig, tokens: int, mesh: Mesh) -> dict[str, Any]:
    """One program of `tokens` new tokens a row over a full-size cache."""
    graph, state = abstract_decoder(config)
    transform = kvjax.cache(encode=kvjax.encode.from_config(_ENCODE.value))
    spec = cache_spec(config, "bfloat16")
    cache = jax.eval_shape(lambda: transform.init(spec, _BATCH.value, _CONTEXT.value))
    everywhere = NamedSharding(mesh, PartitionSpec())
    shape = jax.ShapeDtypeStruct((_BATCH.value, tokens), jnp.int32, sharding=everywhere)

    def step(state: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, state)
        hidden, _, cache = step_aligned(model, tokens, cache, None, False)
        return unembed(model, model.norm(hidden[:, -1:])), cache

    start = time.perf_counter()
    arguments = (
        abstract(state, decoder_shardings(state, config, mesh)),
        shape,
        abstract(cache, cache_shardings(cache, mesh)),
    )
    lowered = jax.jit(step, donate_argnums=2).trace(*arguments).lower(lowering_platforms=("tpu",))
    middle = time.perf_counter()
    memory = lowered.compile().memory_analysis()
    return {
        "lower_seconds": round(middle - start, 2),
        "compile_seconds": round(time.perf_counter() - middle, 2),
        "arguments_bytes": memory.argument_size_in_bytes,
        "outputs_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; options start with --")
    config = load_config(_MODEL.value) if _MODEL.value else QWEN3_4B
    topology = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGY.value)
    mesh = Mesh(np.array(topology.devices), ("model",))
    for name, tokens in (("prefill", _CHUNK.value), ("decode", 1)):
        head = {"program": name, "tokens": tokens, "layers": len(config.layers)}
        head |= {"topology": _TOPOLOGY.value, "chips": mesh.size, "context": _CONTEXT.value}
        head |= {"batch": _BATCH.value, "encode": _ENCODE.value, "note": "compiled, not run"}
        print(json.dumps(head | compile_step(config, tokens, mesh)), flush=True)


if __name__ == "__main__":
    app.run(main)
