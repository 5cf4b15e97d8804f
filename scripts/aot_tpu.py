"""Compiles the ops for a TPU on a machine that has none; a JSON line each.

    pip install libtpu -c constraints.txt
    .venv/bin/python scripts/aot_tpu.py v5e|v6e|v5p|tpu7x [--all]

A line has the op and its shapes, `compile_seconds` (lowering included), the bytes of arguments,
outputs and temporaries, and `kernel_bundles`: the length of each kernel's final schedule from the
compiler's own dump, in VLIW bundles, the empty ones of its latency model included. "Compiled, not
run."

By default one shape per op and width; --all: the shapes of Qwen3-4B and Llama-3.1-8B (one KV
geometry: 32 query heads, 8 KV heads, head_dim 128) at 4K, 32K and 128K tokens, batch 1 and 8,
widths 2, 4 and 8, one and eight new tokens.
"""

from __future__ import annotations

import os
import tempfile

# The compiler reads its options once, when it is first loaded.
os.environ.update(
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_LOG_DIR="disabled",
    LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={tempfile.gettempdir()}/kvjax-aot-{os.getpid()} "
    "--xla_jf_dump_llo_text=true",
)  # fmt: skip

import functools
import importlib.util
import itertools
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvjax.ops import packing
from kvjax.ops.affine import Affine
from kvjax.ops.dense_decode_attention.api import dense_decode_attention
from kvjax.ops.encode_tile import api as encode
from kvjax.ops.partials import Scoring
from kvjax.ops.quantized_decode_attention.api import quantized_decode_attention
from scripts.aot_programs import Program, delta_scans, length, query

DUMP = Path(tempfile.gettempdir()) / f"kvjax-aot-{os.getpid()}"
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2} ?)*\s*:\s*(?:> ?)*\s*\{", re.MULTILINE)


def missing() -> str:
    """What this machine lacks to compile for TPUs; "" if nothing."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install libtpu -c constraints.txt"
    return ""


def compile_for(target: str, program: Program) -> dict[str, Any]:
    """Compiles for shapes: seconds, bytes, and the lengths of its kernels' schedules."""
    from jax._src.mesh import AbstractDevice  # it has no public name yet

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target])
    device = topology.devices[0]
    named = AbstractDevice(
        device_kind=device.device_kind, num_cores=getattr(device, "num_cores", 1), platform="tpu"
    )
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=named)
    one = jax.sharding.SingleDeviceSharding(device)
    jitted = jax.jit(program.function, in_shardings=one, out_shardings=one)
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jitted.trace(*program.arguments).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return {
        "compile_seconds": round(seconds, 2),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "kernel_bundles": _schedules(DUMP, kernels(compiled.as_text())),
    }


def kernels(program: str) -> set[str]:
    """Names of the Pallas calls of a compiled program."""
    calls = re.findall(r"%([\w.\-]+) = [^\n]*custom_call_target=\"tpu_custom_call\"", program)
    return set(calls)


def _schedules(dump: Path, names: set[str]) -> dict[str, int]:
    """Bundles of each kernel's final schedule; empties the dump for the next program."""
    found = {}
    for path in dump.iterdir():
        match = re.fullmatch(r"\d+-(.*)-\d+-packed-bundles-post-ra\.txt", path.name)
        if match and match[1] in names:
            found[match[1]] = bundles(path.read_text(errors="replace"))
        path.unlink()
    return found


def bundles(schedule: str) -> int:
    """Bundles of a schedule in the compiler's text form."""
    return len(BUNDLE.findall(schedule))


def programs(everything: bool = False) -> Iterator[Program]:
    """The ops at the shapes that the docstring names."""
    sizes = (4096, 32768, 131072) if everything else (4096,)
    some = (1, 8) if everything else (1,)
    for batch, size, tokens in itertools.product(some, sizes, some):
        yield exact(batch, tokens, size)
        for bits, column in ((2, False), (2, True), (4, False), (8, False)):
            yield quantized(batch, tokens, size, bits, column)
    for batch, bits in itertools.product((1, 8), (2, 4)) if everything else [(1, 2)]:
        yield from encoded(batch, bits)
    yield from delta_scans(everything, {"implementation": "tpu"})
    if not everything:
        yield quantized(1, 8, 4096, 2, False)
        yield quantized(1, 1, 4096, 2, False, heads=9, kv_heads=3, dim=64)  # SmolLM2's


def body(
    batch: int, kv_heads: int, tiles: int, dim: int, format: Affine
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes of the leaves that `append` writes."""

    def side(role: str) -> dict[str, Any]:
        rows, minor = format.shape(role, dim)
        leaves = {"codes": (packing.words(rows, format.bits(role)), minor), "affine": (rows,)}
        if format.column:
            leaves["column"] = (minor // 2,)
        lead = (batch, kv_heads, tiles)
        return {n: jax.ShapeDtypeStruct(lead + s, jnp.int32) for n, s in leaves.items()}

    return side("key"), side("value")


def quantized(
    batch: int, tokens: int, size: int, bits: int, column: bool,
    heads: int = 32, kv_heads: int = 8, dim: int = 128, meta: str = "float16",
) -> Program:  # fmt: skip
    format = Affine(128, bits, bits, column, meta)
    key, value = body(batch, kv_heads, size // 128, dim, format)

    def function(query: Any, key: Any, value: Any, made: Any) -> Any:
        return quantized_decode_attention(
            query, jnp.zeros(query.shape[:2], jnp.int32), key, value, made, format=format,
            scoring=Scoring(dim**-0.5), implementation="tpu",
        )  # fmt: skip

    shape = dict(batch=batch, tokens=tokens, size=size, heads=heads, kv_heads=kv_heads, dim=dim)
    shape |= {"bits": bits, "column": column}
    arguments = (query(batch, tokens, heads, dim), key, value, length(batch))
    return Program("quantized_decode_attention", shape, function, arguments)


def exact(batch: int, tokens: int, size: int, heads: int = 32, kv_heads: int = 8) -> Program:
    dim = 128
    entries = jax.ShapeDtypeStruct((batch, kv_heads, size, dim), jnp.bfloat16)
    function = functools.partial(
        dense_decode_attention, scoring=Scoring(dim**-0.5), implementation="tpu"
    )
    shape = dict(batch=batch, tokens=tokens, size=size, heads=heads, kv_heads=kv_heads, dim=dim)
    arguments = (query(batch, tokens, heads, dim), entries, entries, length(batch))
    return Program("dense_decode_attention", shape, function, arguments)


def encoded(batch: int, bits: int) -> Iterator[Program]:
    """A tile of every KV head, keys and values, by both encoders."""
    x = jax.ShapeDtypeStruct((batch, 8, 1, 128, 128), jnp.bfloat16)
    for role in ("key", "value"):
        shape = dict(batch=batch, kv_heads=8, tile=128, dim=128, bits=bits, role=role)
        kvarn = functools.partial(
            encode.kvarn_tile, role=role, options=encode.Kvarn(bits), implementation="tpu"
        )
        yield Program("encode_tile", shape | {"encoder": "kvarn"}, kvarn, (x,))
        heed = functools.partial(
            encode.heed_tile, role=role, options=encode.Heed(bits), implementation="tpu"
        )
        yield Program(
            "encode_tile", shape | {"encoder": "heed"},
            lambda x, query, heed=heed: heed(x, query=query), (x, x),
        )  # fmt: skip


def lines(target: str, everything: bool = False) -> Iterator[dict[str, Any]]:
    """A record of every program; one that fails to compile has an `error` in place of figures."""
    for program in programs(everything):
        head = {"target": target, "op": program.op, **program.shape, "note": "compiled, not run"}
        try:
            yield head | compile_for(target, program)
        except Exception as error:  # the others go on, and the exit status says so
            yield head | {"error": f"{type(error).__name__}: {error}"[:500]}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in TOPOLOGIES or set(arguments[1:]) - {"--all"}:
        print(f"usage: aot_tpu.py {'|'.join(TOPOLOGIES)} [--all]", file=sys.stderr)
        return 2
    if lack := missing():
        print(lack, file=sys.stderr)
        return 1
    failed = False
    try:
        for line in lines(arguments[0], "--all" in arguments):
            failed |= "error" in line
            print(json.dumps(line), flush=True)
    finally:
        shutil.rmtree(DUMP, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
