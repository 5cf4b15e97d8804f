import json
import subprocess
import sys

import jax
import pytest
from ml_collections import ConfigDict

import kvjax
from experiments.args import config_module
from experiments.footprint import rows, token_count
from experiments.transforms import build, resolve
from kvjax.io.hf import load_config
from tests.experiments.conftest import CONFIG, ROOT


def grid():
    module, _ = config_module(CONFIG)
    return module.get_config("smoke")


def test_the_formula_is_the_bytes_of_an_allocated_cache(tiny_model):
    model, _ = kvjax.load(tiny_model)
    study = grid()
    table = {r["cache"]: r for r in rows(model.config, study.grid, study.cache, 3, 700, "float32")}
    assert list(table) == list(study.grid)
    for name, row in table.items():
        base = {"sink": study.cache.sink, "tile": study.cache.tile}
        transform = build(resolve(ConfigDict(base | dict(study.grid[name].items()))))
        live = kvjax.init_cache(model, transform, batch=3, capacity=700)
        assert row["bytes"] == f"{kvjax.nbytes(live).total:,}"
        assert kvjax.nbytes(live).total == sum(leaf.nbytes for leaf in jax.tree.leaves(live))


def test_a_transform_that_the_model_cannot_have_says_why(tiny_model, tmp_path):
    data = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"head_dim": 24}))
    study = grid()
    found = rows(load_config(tmp_path), study.grid, study.cache, 1, 700, "bfloat16")
    table = {row["cache"]: row for row in found}
    assert "24" in table["kvarn-k2v2"]["note"]
    assert "bytes" in table["exact"]


@pytest.mark.parametrize(("text", "count"), [("8192", 8192), ("128k", 131072), ("1M", 1024**2)])
def test_contexts(text, count):
    assert token_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "0", "-5", "1.5k", "128kb", "12 8"])
def test_contexts_that_are_none(text):
    with pytest.raises(ValueError, match="--context="):
        token_count(text)


def test_the_command_needs_a_config_json_alone(tiny_model, tmp_path):
    """A 36-layer model at 128k: no weights, and nothing of its 18 GiB is allocated."""
    data = json.loads((tiny_model / "config.json").read_text())
    data |= {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
             "head_dim": 128, "hidden_size": 4096}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    command = [sys.executable, "-m", "experiments.footprint", f"--model={path}"]
    done = subprocess.run([*command, "--context=128k"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    exact = next(line for line in done.stdout.splitlines() if line.startswith("| exact"))
    assert "18.000" in exact and "16.000" in exact  # GiB, bits per element
