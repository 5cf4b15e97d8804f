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
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports JAX; the compiler needs no chip
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import json  # noqa: E402

from absl import app, flags  # noqa: E402

import kvjax  # noqa: E402
from experiments.scale.programs import QWEN3_4B, decoder_step, tpu_slice  # noqa: E402
from kvjax.io.hf import load_config  # noqa: E402

_TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x2", "topology string: v5e:2x2, v6e:2x2, …")
_CONTEXT = flags.DEFINE_integer("context", 131072, "the cache's capacity in tokens")
_CHUNK = flags.DEFINE_integer("chunk", 512, "tokens of the prefill chunk")
_BATCH = flags.DEFINE_integer("batch", 1, "rows")
_ENCODE = flags.DEFINE_string("encode", "none", "an encoder's name, with its default arguments")
_MODEL = flags.DEFINE_string("model", None, "a config.json; Qwen3-4B's shape without one")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; options start with --")
    config = load_config(_MODEL.value) if _MODEL.value else QWEN3_4B
    where = tpu_slice(_TOPOLOGY.value)
    transform = kvjax.cache(encode=kvjax.encode.from_config(_ENCODE.value))
    for name, tokens in (("prefill", _CHUNK.value), ("decode", 1)):
        head = {"program": name, "tokens": tokens, "layers": len(config.layers)}
        head |= {"topology": where.name, "chips": len(where.devices), "context": _CONTEXT.value}
        head |= {"batch": _BATCH.value, "encode": _ENCODE.value, "note": "compiled, not run"}
        found = decoder_step(where, config, transform, tokens, _CONTEXT.value, _BATCH.value)
        print(json.dumps(head | found), flush=True)


if __name__ == "__main__":
    app.run(main)
