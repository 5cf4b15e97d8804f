"""The scale study, with a compiler that only counts; the true one is in tests/scripts."""

import json

import pytest

from experiments import points, table
from experiments.args import config_module, with_overrides
from experiments.points import study
from experiments.scale import programs, report, run
from experiments.table import load
from tests.experiments.conftest import ROOT

FILE = str(ROOT / "configs/scale.py")
GB = 10**9


def config_of(arg="", **changes):
    config = config_module(f"{FILE}:{arg}")[0].get_config(arg)
    return with_overrides(config, changes)


@pytest.fixture
def compiler(monkeypatch):
    """Stands in for libtpu: 2 GB of weights and 1 MB a token, 8 GB a chip; tells what it made."""
    made = []

    def found(size):
        return {"fits": size <= 8 * GB, "peak_bytes": size}

    def decoder_step(where, config, transform, tokens, capacity):
        made.append((where.name, tokens, capacity))
        return found(2 * GB + capacity * 10**6)

    def encoder_pass(where, soft, count):
        made.append((where.name, "encoder", soft.ratios))
        return found(5 * GB) | {"weights_bytes": GB}

    def training_step(where, recipe, soft):
        made.append((where.name, recipe.shape.rows, recipe.shape.micro))
        return found(60 * GB // len(where.devices))

    monkeypatch.setattr(programs, "tpu_slice", lambda name: programs.Slice(name, range(4)))
    for function in (decoder_step, encoder_pass, training_step):
        monkeypatch.setattr(programs, function.__name__, function)
    return made


def test_a_curve_is_the_larger_of_its_two_parts_and_programs_are_shared(compiler, tmp_path):
    config = config_of("inference", **{"rows": ("v5e:2x2",),
                                       "inference.contexts": (4096, 16384)})  # fmt: skip
    todo = [p for p in study(config).points(config) if p.config.method in ("exact", "lclm-4")]
    assert all(o.status == "done" for o in points.run_all(todo, tmp_path))
    exact, soft = (json.loads((tmp_path / f"points/v5e-2x2-{n}/result.json").read_text())
                   for n in ("exact", "lclm-4"))  # fmt: skip
    sizes = [(p["context"], p["peak_bytes"], p["fits"]) for p in exact["curve"]]
    assert sizes == [(4096, 6_096_000_000, True), (16384, 18_384_000_000, False)]
    # 1,024 and 4,096 places: the encoder's pass is larger, then the decoder with its weights.
    assert [p["peak_bytes"] for p in soft["curve"]] == [5 * GB, 7_096_000_000]
    assert len(compiler) == len(set(compiler)) == 2 * 3 + 1  # 4,096 places are compiled once
    again = [p for p in study(config).points(config) if p.config.method == "lclm-8"]
    points.run_all(again, tmp_path)
    assert len(compiler) == 2 * 3 + 1 + 1 + 2  # its encoder, and 2,048 places


def test_training_keeps_the_rows_of_a_step_on_every_slice(compiler, tmp_path):
    config = config_of("training", rows=("v5p:2x2x1",))
    (point,) = study(config).points(config)
    points.run_all([point], tmp_path)
    found = json.loads((tmp_path / f"points/{point.name}/result.json").read_text())
    assert compiler == [("v5p:2x2x1", 4, 64)]
    assert found["scale"]["tokens"] == 256 * 16384 and not found["step"]["fits"]
    recipe = run.sized(point.config, 64)
    assert (recipe.shape.rows, recipe.shape.micro, recipe.mesh.fsdp) == (64, 4, 64)
    assert recipe.shape.windows == point.config.recipe.shape.windows


def test_tables_and_pictures_are_of_all_methods(compiler, tmp_path):
    config = config_of(rows=("v5e:2x2", "v5p:2x2x1"))
    points.run_all(study(config).points(config), tmp_path)
    results = load(tmp_path)
    text = table.markdown(results, [])
    assert "inference on v5e:2x2 (4 chips)" in text and "training, 256 rows" in text
    assert "> " in text and "4,194,304" in text
    for scale, group in table.by_scale(results):
        assert report.draw(scale, group).axes


def test_what_the_compiler_says_of_too_large_a_program():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in hbm. Used 40.25G of 15.75G hbm. Exceeded"
    found = programs._needed(message, 5)
    assert found["peak_bytes"] == int(40.25 * 2**30)
    assert found["available_bytes"] == int(15.75 * 2**30)
    message = "for HLO temporaries (512.00M) exceeds available HBM (15.75G). HLO module: jit__step"
    assert programs._needed(message, 5)["peak_bytes"] == 2**29 + 5
    with pytest.raises(RuntimeError, match="INTERNAL"):
        programs._needed("INTERNAL: something else", 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ("v5e:3x3",)}, r"config\.rows: no 'v5e:3x3' among the slices"),
        ({"inference.contexts": (1001,)}, r"methods\.lclm-16\.ratio=16: must divide"),
        ({"inference.chunk": 0}, r"config\.inference\.chunk=0"),
        ({"parts": ("serving",)}, r"config\.parts: 'serving'"),
    ],
)
def test_a_wrong_config_is_refused_before_anything_compiles(changes, message):
    config = config_of(**changes)
    with pytest.raises(ValueError, match=message):
        study(config).validate(config)
