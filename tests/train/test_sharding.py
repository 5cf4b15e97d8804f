"""Weights over a mesh: every axis divides something, and several devices compute the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.train.sharding import make_mesh, param_shardings

ROOT = Path(__file__).parents[2]


def test_the_largest_axis_that_is_left_is_split():
    mesh = jax.sharding.AbstractMesh((1, 4, 2), ("data", "fsdp", "model"))
    by_head = {"q": NamedSharding(mesh, PartitionSpec(None, "model"))}
    shapes = {"q": (8, 64), "norm": (6,), "embed": (7, 8), "wide": (4, 16)}
    found = param_shardings(shapes, mesh, by_head)
    assert found["q"].spec == PartitionSpec("fsdp", "model")
    assert found["norm"].spec == PartitionSpec(None)
    assert found["embed"].spec == PartitionSpec(None, "fsdp")
    assert found["wide"].spec == PartitionSpec(None, "fsdp")


def test_a_mesh_needs_its_devices():
    with pytest.raises(ValueError, match=r"mesh: 64 × 1 × 1 devices \(data, fsdp, model\) of"):
        make_mesh(data=64)
    assert dict(make_mesh().shape) == {"data": 1, "fsdp": 1, "model": 1}


SCRIPT = """
import sys, json, jax, numpy as np
from pathlib import Path
from experiments.args import config_module, with_overrides
from experiments.lclm import training
from experiments.lclm.examples import Maker
from experiments.lclm.model import fresh, soft_config, tiny_config
from experiments.lclm.words import vocabulary
from experiments.points import study
from kvjax.soft import add_memory_rows, new_model
from kvjax.soft.encoder import first_layers
from kvjax.train import take_apart

smoke = config_module("configs/lclm.py:smoke")[0].get_config("smoke")
(point,) = study(smoke).points(smoke)
text = "The sun rises in the east, and it sets in the west. 1 2 3.\\n" * 40
folder = Path(sys.argv[1])
words = vocabulary([text], 300, folder / "words.json")
ids = np.asarray(words.encode(text), np.int32)
pieces = [ids[at : at + 96] for at in range(0, 480, 96)]
for name, mesh in (("one", (1, 1, 1)), ("four", (1, 2, 2))):
    sizes = dict(zip(("mesh.data", "mesh.fsdp", "mesh.model"), mesh))
    config = with_overrides(point.config, sizes | {"model.tiny.kv_heads": 2})
    base = fresh(tiny_config(config.model.tiny, words.vocab_size, 1024), 0)
    decoder, markers = add_memory_rows(base)
    model = new_model(first_layers(base, 1), decoder, soft_config(config, markers))
    maker = Maker(config.data, words, model.config)
    frame, params = take_apart(model)
    devices = training.devices_for(config, model)
    fitted = training.train(config, frame, params, maker, pieces, folder / name, devices)
    where = fitted.params["decoder.layers.0.mlp.up_proj.kernel"].sharding
    print(name, len(where.device_set), tuple(where.spec) if devices else "")
"""


@pytest.mark.slow
def test_four_devices_train_as_one_does(tmp_path):
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert "four 4 ('fsdp', 'model')" in run.stdout
    read = (json_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "four"))
    for one, four in zip(*read, strict=True):
        np.testing.assert_allclose(one["loss"], four["loss"], rtol=1e-4)
        np.testing.assert_allclose(one["gradient_norm"], four["gradient_norm"], rtol=1e-3)


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
