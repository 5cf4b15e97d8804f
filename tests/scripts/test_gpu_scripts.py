"""scripts/aot_h100.py and scripts/device/quantize.py, as far as a machine without a GPU goes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
AOT, DEVICE = ROOT / "scripts/aot_h100.py", ROOT / "scripts/device/quantize.py"
PTXAS = """ptxas info    : Compiling entry function 'a' for 'sm_90a'
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 70 registers"""


@pytest.fixture(scope="module")
def aot():
    spec = importlib.util.spec_from_file_location("aot_h100", AOT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    os.environ.pop("MOSAIC_GPU_DUMP_PTXAS")


def run(script, *arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, env=environment
    )


def test_registers_and_spills_are_read_from_what_ptxas_prints(aot):
    assert aot._resources(PTXAS) == {"registers": 168, "spill_bytes": 28}
    assert aot._resources("nothing") == {}


def test_every_program_has_arguments_that_fit_it(aot):
    everything = list(aot.programs(everything=True))
    assert len({(p.op, *sorted(p.shape.items())) for p in everything}) == len(everything) == 84
    encoded = [p for p in aot.programs() if p.op == "encode_tile"]
    assert len(encoded) == 8
    for program in encoded:
        heads, dim, role = (program.shape[n] for n in ("kv_heads", "dim", "role"))
        made = jax.eval_shape(program.function, *program.arguments)
        shape = (dim // 16, 128) if role == "key" else (8, dim)
        assert made["codes"].shape == (1, heads, 1, *shape)


def test_what_is_missing_is_said(aot, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    assert "jax-cuda13-plugin" in aot.missing()
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(aot.shutil, "which", lambda name: None)
    assert "ptxas" in aot.missing()


@pytest.mark.slow
def test_every_op_compiles_for_an_h100_without_spills(aot):
    if lack := aot.missing():
        pytest.skip(lack)
    done = run(AOT)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line["op"] for line in lines} == {
        "dense_decode_attention", "quantized_decode_attention", "encode_tile",
    }  # fmt: skip
    for line in lines:
        assert line["spill_bytes"] == 0 < line["registers"], line


def test_the_device_check_says_that_there_is_no_gpu():
    done = run(DEVICE)
    assert done.returncode == 1 and "no GPU here" in done.stderr


@pytest.mark.slow
def test_the_device_check_runs_dry(tmp_path):
    done = run(DEVICE, "--dry_run", f"--output={tmp_path}/x/device.json")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "x/device.json").read_text())
    assert record["dry_run"] and all(row["passed"] for row in record["correctness"])
    assert [row["kernel"] for row in record["rows"]] == ["exact", "XLA, exact", "2 bits"]
    assert all(row["bandwidth"] > 0 for row in record["rows"])
    assert record["correctness"][-1]["kernel"] == "kvarn value"
    (encoding,) = record["encoding"]
    assert encoding["seconds"] > 0 and encoding["xla"] > 0
