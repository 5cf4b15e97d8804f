"""Compiles the ops for an H100 on a machine that has no GPU; a JSON line each.

    pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt -c constraints.txt   (jax's version)
    .venv/bin/python scripts/aot_h100.py [--all]

The plugin calls `ptxas` (CUDA 13, from the toolkit or the nvidia-cuda-nvcc package), which must be
on the path. A line has the op and its shapes, `compile_seconds` (lowering included), the bytes of
arguments, outputs and temporaries, and for Mosaic kernels `registers` of a thread and
`spill_bytes` (stores and loads), as `ptxas` prints them. "Compiled, not run."

By default one shape per op and width; --all: the shapes of Qwen3-4B and Llama-3.1-8B (one KV
geometry: 32 query heads, 8 KV heads, head_dim 128) at 4K, 32K and 128K tokens, batch 1 and 8,
widths 2, 4 and 8, one and eight new tokens.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_PTXAS="1")

import functools
import importlib.util
import itertools
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvjax.ops import packing
from kvjax.ops.affine import Affine
from kvjax.ops.dense_decode_attention import gpu as dense
from kvjax.ops.encode_tile import gpu as encode
from kvjax.ops.encode_tile.heed import Heed
from kvjax.ops.encode_tile.reference import Kvarn
from kvjax.ops.gpu_blocks import dense_blocks, packed_blocks
from kvjax.ops.partials import Scoring
from kvjax.ops.quantized_decode_attention import gpu as packed
from scripts.aot_programs import Program, delta_scans, length, query

CORES = 132
NAME = "NVIDIA H100 80GB HBM3"
TARGET = f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: {CORES}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }} registers_per_core_limit: 65536
  registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
device_description_str: "{NAME}" """


def missing() -> str:
    """What this machine lacks to compile for GPUs; "" if nothing."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "jax-cuda13-plugin and jax-cuda13-pjrt are not installed (see the docstring)"
    return "" if shutil.which("ptxas") else "ptxas (CUDA 13) is not on the path"


def compile_for_h100(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Compiles `function` for shapes: seconds, bytes, and registers and spills of its kernels."""
    from jax._src.mesh import AbstractDevice  # it has no public name yet

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x1", target_config=TARGET
    )
    device = AbstractDevice(device_kind=NAME, num_cores=CORES, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    one = jax.sharding.SingleDeviceSharding(topology.devices[0])
    jitted = jax.jit(function, in_shardings=one, out_shardings=one)
    start = time.perf_counter()
    with _printed() as printed:
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return {
        "compile_seconds": round(seconds, 2),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        **_resources("".join(printed)),
    }


class _printed:
    """What this process, its C++ included, writes to its standard streams meanwhile."""

    def __enter__(self) -> list[str]:
        self.text: list[str] = []
        self.file = tempfile.TemporaryFile()
        sys.stdout.flush()
        self.saved = [os.dup(stream) for stream in (1, 2)]
        for stream in (1, 2):
            os.dup2(self.file.fileno(), stream)
        return self.text

    def __exit__(self, *failure: Any) -> None:
        for stream, saved in zip((1, 2), self.saved, strict=True):
            os.dup2(saved, stream)
            os.close(saved)
        self.file.seek(0)
        self.text.append(self.file.read().decode(errors="replace"))
        self.file.close()


def _resources(printed: str) -> dict[str, int]:
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", printed)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    if not registers:
        return {}
    spilled = sum(int(count) for pair in spills for count in pair)
    return {"registers": max(registers), "spill_bytes": spilled}


def programs(everything: bool = False) -> Iterator[Program]:
    """The ops at the shapes that the docstring names."""
    sizes = (4096, 32768, 131072) if everything else (4096,)
    for batch, size, tokens in itertools.product(
        (1, 8) if everything else (1,), sizes, (1, 8) if everything else (1,)
    ):
        yield exact(batch, tokens, size)
        for bits, column in ((2, False), (2, True), (4, False), (8, False)):
            yield quantized(batch, tokens, size, bits, column)
    for batch, bits in itertools.product((1, 8), (2, 4)) if everything else [(1, 2)]:
        yield from encoded(batch, bits)
    yield from delta_scans(everything, {"form": "chunked"})  # what a GPU takes
    if not everything:
        yield quantized(1, 8, 4096, 2, False)
        yield quantized(1, 1, 4096, 2, False, heads=9, kv_heads=3, dim=64)  # SmolLM2's
        yield from encoded(1, 2, kv_heads=3, dim=64)


def quantized(
    batch: int, tokens: int, size: int, bits: int, column: bool,
    heads: int = 32, kv_heads: int = 8, dim: int = 128,
) -> Program:  # fmt: skip
    tile, tiles = 128, size // 128
    lead = (batch, kv_heads, tiles)
    key = {"codes": (*lead, packing.words(dim, bits), tile), "affine": (*lead, dim)}
    value = {"codes": (*lead, packing.words(tile, bits), dim), "affine": (*lead, tile)}
    if column:
        key["column"], value["column"] = (*lead, tile // 2), (*lead, dim // 2)
    key, value = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.int32), (key, value), is_leaf=_is_shape
    )
    function = functools.partial(
        packed.attention, bias=None, format=Affine(tile, bits, bits, column, "float16"),
        scoring=Scoring(dim**-0.5), blocks=packed_blocks(batch, kv_heads, tiles, CORES),
    )  # fmt: skip
    shape = dict(batch=batch, tokens=tokens, size=size, heads=heads, kv_heads=kv_heads, dim=dim)
    return Program(
        "quantized_decode_attention",
        shape | {"bits": bits, "column": column},
        function,
        (query(batch, tokens, heads, dim), key, value, length(batch)),
    )


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and isinstance(x[0], int)


def encoded(batch: int, bits: int, kv_heads: int = 8, dim: int = 128) -> Iterator[Program]:
    """A tile of every KV head, keys and values, by both encoders."""
    x = jax.ShapeDtypeStruct((batch, kv_heads, 1, 128, dim), jnp.bfloat16)
    for role in ("key", "value"):
        shape = dict(batch=batch, kv_heads=kv_heads, tile=128, dim=dim, bits=bits, role=role)
        kvarn = functools.partial(encode.kvarn_tile, role=role, options=Kvarn(bits))
        yield Program("encode_tile", shape | {"encoder": "kvarn"}, kvarn, (x,))
        heed = functools.partial(encode.heed_tile, role=role, options=Heed(bits))
        yield Program("encode_tile", shape | {"encoder": "heed"}, _with_query(heed), (x, x))


def _with_query(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, query: function(x, query=query)


def exact(batch: int, tokens: int, size: int, heads: int = 32, kv_heads: int = 8) -> Program:
    dim = 128
    entries = jax.ShapeDtypeStruct((batch, kv_heads, size, dim), jnp.bfloat16)
    function = functools.partial(
        dense.attention, bias=None, scoring=Scoring(dim**-0.5),
        blocks=dense_blocks(batch, kv_heads, size, CORES),
    )  # fmt: skip
    shape = dict(batch=batch, tokens=tokens, size=size, heads=heads, kv_heads=kv_heads, dim=dim)
    arguments = (query(batch, tokens, heads, dim), entries, entries, length(batch))
    return Program("dense_decode_attention", shape, function, arguments)


def lines(everything: bool = False) -> Iterator[dict[str, Any]]:
    """A record of every program; one that fails to compile has an `error` in place of figures."""
    for program in programs(everything):
        head = {"target": "h100", "op": program.op, **program.shape, "note": "compiled, not run"}
        try:
            yield head | compile_for_h100(program.function, program.arguments)
        except Exception as error:  # the others go on, and the exit status says so
            yield head | {"error": f"{type(error).__name__}: {error}"[:500]}


def main(arguments: list[str]) -> int:
    if set(arguments) - {"--all"}:
        print("usage: aot_h100.py [--all]", file=sys.stderr)
        return 2
    if lack := missing():
        print(lack, file=sys.stderr)
        return 1
    failed = False
    for line in lines("--all" in arguments):
        failed |= "error" in line
        print(json.dumps(line), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
