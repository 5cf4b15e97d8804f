"""What encoding costs beside decoding on TPUs, from compiled schedules: nothing is run.

    .venv/bin/python scripts/bench/encode_tile.py --estimator=PATH [--targets v5e,v6e,v5p,tpu7x]
        [--out results/aot/encode_tile.json]

Once in 128 tokens every layer encodes one tile of keys and one of values. This compiles those
kernels for one layer of Qwen3-4B's shape (batch 1, 8 KV heads of dim 128, 2 bits), for Heed with
what XLA does to the queries before, takes the time that PATH estimates from the compiler's final
schedule, times 36 layers, and divides it by the time of 128 decoding steps at a context of 32,768.
For a step it takes what HBM needs at least, for the weights in bfloat16 and the encoded cache: a
real step is longer, so the share is an upper bound.

PATH is a Python file with `measure(spec, target) -> dict`, which compiles what `module:function`
returns, (callable, shapes), for a target and gives `us_sim`, microseconds with the stalls of the
schedule and of its memory transfers, or `error`.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import encode
from kvjax.ops.encode_tile import tpu
from kvjax.ops.encode_tile.heed import Heed

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 36, 2560, 9728, 32, 8, 128, 151936
TILE, CONTEXT = 128, 32768
# GB/s of one JAX device, as published: half a chip on tpu7x, both cores on v5p.
HBM = {"v5e": 819, "v6e": 1640, "v5p": 2765, "tpu7x": 3690}
Factory = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]

TILES = jax.ShapeDtypeStruct((1, KV_HEADS, TILE, DIM), jnp.bfloat16)
QUERIES = jax.ShapeDtypeStruct((1, HEADS, TILE, DIM), jnp.bfloat16)


def kvarn_key() -> Factory:
    return lambda x: tpu.kvarn_tile(x, "key", encode.kvarn().options("key")), [TILES]


def kvarn_value() -> Factory:
    return lambda x: tpu.kvarn_tile(x, "value", encode.kvarn().options("value")), [TILES]


def heed_key() -> Factory:
    """With the sum of q qᵀ, XLA's."""

    def one(x: jax.Array, query: jax.Array) -> Any:
        return tpu.heed_tile(x, "key", Heed(2), query.reshape(1, KV_HEADS, -1, DIM))

    return one, [TILES, QUERIES]


def heed_value() -> Factory:
    return lambda x: tpu.heed_tile(x, "value", Heed(2), None), [TILES]


ENCODERS = {
    "kvarn": (encode.kvarn(), (kvarn_key, kvarn_value)),
    "heed": (encode.heed(), (heed_key, heed_value)),
}


def weight_bytes() -> int:
    """Weights of Qwen3-4B in bfloat16; the embedding is also the unembedding and read once."""
    attention = HIDDEN * DIM * (2 * HEADS + 2 * KV_HEADS)
    return 2 * (LAYERS * (attention + 3 * HIDDEN * INNER) + VOCABULARY * HIDDEN)


def cache_bytes(encoder: Any) -> int:
    tile = encoder.tile_bytes("key", DIM) + encoder.tile_bytes("value", DIM)
    return LAYERS * KV_HEADS * CONTEXT // TILE * tile


def estimate(measure: Callable[..., dict[str, Any]], name: str, target: str) -> dict[str, Any]:
    """One row of the results."""
    encoder, factories = ENCODERS[name]
    row: dict[str, Any] = {"encoder": name, "target": target, "note": "compiled schedule, not run"}
    for factory in factories:
        found = measure(f"{__file__}:{factory.__name__}", target)
        if "error" in found:
            raise RuntimeError(f"{factory.__name__} for {target}: {found['error']}")
        row[f"{factory.__name__}_us"] = found["us_sim"]
    encoding = LAYERS * sum(row[f"{factory.__name__}_us"] for factory in factories)
    step = (weight_bytes() + cache_bytes(encoder)) / HBM[target] / 1e3
    return row | {
        "encode_us": round(encoding, 1),
        "step_us": round(step, 1),
        "share_percent": round(100 * encoding / (TILE * step), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--estimator", required=True, type=Path)
    parser.add_argument("--targets", default=",".join(HBM))
    parser.add_argument("--out", default=Path("results/aot/encode_tile.json"), type=Path)
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location("estimator", options.estimator)
    if spec is None or spec.loader is None:
        parser.error(f"--estimator={options.estimator} is no Python file")
    estimator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(estimator)
    rows = []
    for name in ENCODERS:
        for target in options.targets.split(","):
            rows.append(estimate(estimator.measure, name, target))
            print(json.dumps(rows[-1]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
