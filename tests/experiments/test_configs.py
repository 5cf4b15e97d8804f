"""Every config file resolves, in every variant, before anything is compiled or loaded."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import start, sweep
from experiments.args import check_types, config_module, with_overrides
from experiments.points import study
from experiments.record import write_json
from kvjax.soft import SoftConfig
from tests.experiments.conftest import CONFIG, ROOT

FILES = sorted(str(path) for path in (ROOT / "configs").glob("*.py") if path.stem != "__init__")
VARIANTS = {
    "head_to_head": ("", "smoke", "full"),
    "kvarn": ("", "smoke", "paired", "retrieval", "variants", "paper"),
    "delta_mem": ("", "smollm2", "variants", "compose", "ceiling", "paper", "smoke"),
    "lclm": ("", "tiny", "smollm2", "paper", "smoke"),
    "scale": ("", "inference", "training"),
}
FILE_VARIANTS = [(file, variant) for file in FILES for variant in VARIANTS[Path(file).stem]]


@pytest.mark.parametrize(
    ("file", "variant"),
    FILE_VARIANTS,
    ids=[f"{Path(file).stem}:{variant}" for file, variant in FILE_VARIANTS],
)
def test_a_config_resolves_to_points(file, variant, tmp_path):
    module, arg = config_module(f"{file}:{variant}")
    config = module.get_config(arg)
    check_types(config, module.get_config(arg))
    if "compressor" in config:  # another study's result: a file of settings is all that is read
        write_json(tmp_path / "soft.json", dataclasses.asdict(SoftConfig(1, 2, 3, (8,), 32)))
        config.compressor = str(tmp_path)
    study(config).validate(config)
    assert study(config).points(config)
    if hasattr(module, "sweep"):
        names = [point.name for point in sweep.sweep_points(module, config, [])]
        assert len(names) == len(set(names)) >= 2


def test_the_default_grid_has_the_rows_it_promises():
    config = config_module(CONFIG)[0].get_config()
    labels = [point.name for point in study(config).points(config)]
    assert len(labels) >= 8
    assert {"exact", "int8", "rtn-4", "rtn-3", "rtn-2", "kvarn-k2v2", "kvarn-k4v2"} <= set(labels)


def test_an_override_of_the_cache_is_one_point_of_its_own():
    config = config_module(CONFIG)[0].get_config()
    changed = with_overrides(config, {"cache.encode.key_bits": 4, "cache.sink": 0})
    (point,) = study(config).points(changed, ["cache.encode.key_bits", "cache.sink"])
    assert point.name == "kvarn-k4v2,sink=0"
    assert point.config.cache.encode.key_bits == 4 and point.config.cache.sink == 0


def test_sinks_and_tile_hold_for_the_whole_grid():
    config = config_module(CONFIG)[0].get_config()
    changed = with_overrides(config, {"cache.sink": 64, "cache.tile": 64})
    found = {p.name: p.config.cache for p in study(config).points(changed, ["cache.sink"])}
    assert list(found) == list(config.grid)
    assert found["kvarn-k2v2"].sink == 64 and found["kvarn-k2v2"].encode.tile == 64
    assert found["streaming"].sink == 0 and "tile" not in found["exact"]


def test_a_sweep_outside_the_cache_tells_its_points_apart():
    module, _ = config_module(CONFIG)
    module.sweep = lambda: [{"length": 512}, {"length": 1024}]
    config = with_overrides(module.get_config(), {"rows": ("exact", "int8")})
    names = [point.name for point in sweep.sweep_points(module, config, [])]
    assert names == [
        "exact,length=512", "int8,length=512", "exact,length=1024", "int8,length=1024"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [({"length": 0}, r"config\.length=0: use 1 or more"),
     ({"length": 1000}, r"config\.length=1000: use a multiple of 4 blocks \(512\)"),
     ({"block": -1}, r"config\.block=-1"),
     ({"dtype": "float8"}, r"config\.dtype='float8': use 'float32'"),
     ({"texts": ()}, r"config\.texts=\(\): name at least one text"),
     ({"texts": ("a/b", "a/b")}, r"config\.texts: a text stands twice"),
     ({"rows": ("kvarn",)}, r"config\.rows: no 'kvarn' in the grid; choose exact")],
)  # fmt: skip
def test_impossible_combinations(change, message):
    config = with_overrides(config_module(CONFIG)[0].get_config(), change)
    with pytest.raises(ValueError, match=message):
        study(config).validate(config)


def test_a_sweep_may_not_leave_the_config():
    module, _ = config_module(CONFIG)
    module.sweep = lambda: [{"cache.encode.key_bit": 4}]
    with pytest.raises(ValueError, match=r"config\.cache\.encode\.key_bit: unknown"):
        sweep.sweep_points(module, module.get_config(), [])
    del module.sweep
    with pytest.raises(ValueError, match=r"this file has no sweep\(\)"):
        sweep.sweep_points(module, module.get_config(), [])


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "--config: missing"),
     (["--config=configs/none.py"], "there is no file configs/none.py"),
     ([f"--config={CONFIG}:smok"], "'smok': unknown; it takes smoke, full"),
     ([f"--config={CONFIG}", "--config.lenght=1"], "config.lenght: unknown; config has block"),
     ([f"--config={CONFIG}", "--config.cache.encode.bits=1"], "config.cache.encode.bits: unknown")],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line_and_exit_code_2(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        start.parse(["launch", *words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--workdir=w", "--config.length=x"], "config.length=x"),
     (["--workdir=w", "--lenght=1"], "Unknown command line flag 'lenght'"),
     (["--workdir=w", "--config.cache.tile=31"], "tile=31 must be an even number"),
     (["--config.length=1024"], "--workdir: missing")],
)  # fmt: skip
def test_a_wrong_launch_leaves_nothing_behind(words, message, tmp_path):
    command = [sys.executable, "-m", "experiments.launch", f"--config={CONFIG}", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
