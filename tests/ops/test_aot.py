"""scripts/aot for TPUs: every program fits its op, and some compile where libtpu is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
SCHEDULE = """    0   :  { %s1 = inlined_call_operand }
  0x1   :  {}
  0x2 LB: > { %v2 = vadd.f32 %v1, %v1 }   /* > { */
 a comment
  0x3 PF: > > { %s2 = sphi
   %s3 }"""


@pytest.fixture(scope="module")
def aot():
    before = dict(os.environ)
    spec = importlib.util.spec_from_file_location("aot_tpu", ROOT / "scripts/aot_tpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ.clear()
    os.environ.update(before)
    return module


def test_bundles_are_counted(aot):
    assert aot.bundles(SCHEDULE) == 4


def test_kernels_are_found_in_a_program(aot):
    text = '%a.1 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", y\n%b = f32[] add'
    assert aot.kernels(text) == {"a.1"}


def test_every_program_has_arguments_that_fit_it(aot):
    everything = list(aot.programs(everything=True))
    assert len({(p.op, *sorted(p.shape.items())) for p in everything}) == len(everything) == 84
    for program in (next(aot.encoded(1, 2)), aot.quantized(1, 1, 4096, 3, True)):
        jax.eval_shape(program.function, *program.arguments)


def test_without_libtpu_it_says_what_is_missing(aot, monkeypatch, capsys):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    assert aot.main(["v5e"]) == 1
    assert "libtpu is not installed" in capsys.readouterr().err


def test_wrong_arguments_print_the_usage():
    done = subprocess.run(
        [ROOT / "scripts/aot", "--target", "v2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "v5e|v6e|v5p|tpu7x|h100" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "tpu7x"])
def test_every_op_compiles_for_a_chip(aot, target):
    if lack := aot.missing():
        pytest.skip(lack)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/aot_tpu.py", target], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line["op"] for line in lines} == {
        "dense_decode_attention", "quantized_decode_attention", "delta_scan", "encode_tile",
    }  # fmt: skip
    assert all(line["temporary_bytes"] < 2**20 for line in lines)
    # A chunked scan is XLA's own program.
    assert all(line["kernel_bundles"] for line in lines if "form" not in line)
