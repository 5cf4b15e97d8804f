"""The study on a tiny model: what each part measures, against what can be known beforehand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import kvjax
from experiments import plot, points, table
from experiments.args import config_module, with_overrides
from experiments.kvarn import keys, patched, report, rows
from experiments.kvarn.retrieval import examples, open_model
from tests.experiments.conftest import ROOT

CONFIG = str(ROOT / "configs" / "kvarn.py")
TINY = {"length": 128, "block": 32, "cache.sink": 32, "cache.tile": 32}
TEXTS = ("python-source/argparse", "python-topics/types")


def config_of(tiny_model, part: str, **changes):
    module, _ = config_module(CONFIG)
    config = module.get_config(part)
    texts = {"model": str(tiny_model), "texts": TEXTS}
    return with_overrides(config, TINY | texts | changes)


@pytest.fixture(scope="module")
def workdir(tiny_model, tmp_path_factory):
    """Results of all three parts in one workdir."""
    folder = tmp_path_factory.mktemp("kvarn")
    chosen = [
        config_of(tiny_model, "", rows=("kvarn-k2v2", "kvarn-k2v2-rest-exact")),
        config_of(tiny_model, "paired", rows=("kvarn-k2v2",)),
        config_of(tiny_model, "retrieval", rows=("exact", "kvarn-k2v2"), **tiny_task()),
    ]
    for config in chosen:
        study = points.study(config)
        study.validate(config)
        assert points.finish(points.run_all(study.points(config), folder)) == 0
    return folder


def tiny_task() -> dict:
    tasks = ConfigDict({"passkey": {"tokens": 440, "depths": (0.0, 1.0)}})
    return {"tasks": tasks, "retrieval.prompts": 4, "retrieval.batch": 3}


@pytest.fixture(scope="module")
def results(workdir) -> dict[str, table.Result]:
    return {each.name: each for each in table.load(workdir)}


def test_side_by_side_decodes_as_alone(results):
    """The paired run's lossy stream is the drift run's, and its exact one the reference."""
    alone, beside = (results[n].result for n in ("kvarn-k2v2", "decode-kvarn-k2v2"))
    for score in ("kl", "nll", "exact_nll"):
        np.testing.assert_allclose(alone["blocks"][score], beside["blocks"][score], atol=2e-4)
    assert beside["quality"]["kl"]["mean"] > 1e-3


def test_the_static_regime_begins_alike_and_stores_another_past(results):
    decode, static = (results[f"{r}-kvarn-k2v2"].result["blocks"] for r in ("decode", "static"))
    # Sinks fill the first block, the second reads only them: no error. The third reads one tile,
    # made of keys that were exact in both regimes.
    for score in ("kl", "attention_mae", "attention_relative"):
        first, other = np.asarray(decode[score]), np.asarray(static[score])
        np.testing.assert_allclose(first[:, :2], 0, atol=1e-4)
        np.testing.assert_allclose(first[:, 2], other[:, 2], rtol=1e-3)
        assert (first[:, 3] != other[:, 3]).any()


def test_errors_of_keys_add_up(results):
    for stream in ("k", "v"):
        found = results["static-kvarn-k2v2"].result["errors"][stream]
        assert 0.05 < found["relative"]["mean"] < 1
        everything = found["worst"][-1]
        assert everything["top"] == 1 and everything["of_all_error"]["mean"] == pytest.approx(1)
        shares = [row["of_all_error"]["mean"] for row in found["worst"]]
        assert shares == sorted(shares)
        assert all(0 <= row["magnitude"]["mean"] <= 1 for row in found["worst"])


def test_magnitude_and_direction_by_hand():
    exact = jnp.array([[[[3.0, 4.0], [3.0, 4.0]]]])  # length 5
    stored = jnp.array([[[[6.0, 8.0], [-4.0, 3.0]]]])  # twice as long; turned by 90 degrees
    found = keys.token_errors(exact, stored)
    np.testing.assert_allclose(found.total[0, 0], [25, 50], rtol=1e-6)
    np.testing.assert_allclose(found.magnitude[0, 0], [25, 0], atol=1e-4)
    shares = keys.split(keys.TokenErrors(*(np.asarray(x)[None] for x in found)))["worst"]
    assert shares[0]["tokens"] == 1 and shares[0]["magnitude"]["mean"] == pytest.approx(0, abs=1e-5)
    assert shares[-1]["magnitude"]["mean"] == pytest.approx(1 / 3, rel=1e-5)


def test_patched_makes_exact_what_it_says():
    x = jax.random.normal(jax.random.key(0), (2, 32, 16)) * jnp.arange(1, 33)[:, None]
    inner = kvjax.encode.kvarn(tile=32)
    stored = inner.decode_tile(inner.encode_tile(x, "value"), "value", 16)
    error = np.square(np.asarray(stored - inner.rotate(x, "value"))).sum(-1)
    left = {}
    for which in patched.WHICH:
        encoder = patched.Patched(32, inner, 0.1, which)
        tile = encoder.encode_tile(x, "value")
        off = np.asarray(encoder.decode_tile(tile, "value", 16) - inner.rotate(x, "value"))
        left[which] = np.square(off).sum(-1)
        assert encoder.tile_bytes("value", 16) == sum(leaf.nbytes for leaf in tile.values()) // 2
    threshold = np.sort(error, axis=-1)[:, -3:].min(-1, keepdims=True)  # 10 % of 32
    np.testing.assert_allclose(left["worst"], np.where(error >= threshold, 0, error), rtol=1e-5)
    np.testing.assert_allclose(left["rest"], np.where(error < threshold, 0, error), rtol=1e-5)


def test_retrieval_agrees_with_one_pass_without_a_cache(results, tiny_model):
    found = results["passkey-exact"]
    config = config_of(tiny_model, "retrieval", rows=("exact",), **tiny_task())
    (point,) = points.study(config).points(config)
    model, tokenizer = open_model(str(tiny_model), "float32")
    asked = examples(tokenizer, point.config)
    assert [item.depth for item in asked] == [0, 0, 1, 1]
    for item, nll, right in zip(asked, *(found.result["examples"][k] for k in ("nll", "right")),
                                strict=True):  # fmt: skip
        ids = np.asarray([item.prompt + item.target])
        logits = np.asarray(kvjax.forward(model, ids))[0, len(item.prompt) - 1 : -1]
        log_p = np.asarray(jax.nn.log_softmax(logits))
        assert nll == pytest.approx(-log_p[range(len(item.target)), item.target].sum(), rel=1e-4)
        assert right == float((log_p.argmax(-1) == item.target).all())
    assert results["passkey-kvarn-k2v2"].result["nll"]["mean"] != found.result["nll"]["mean"]


def test_tables_and_pictures_of_all_parts(workdir, results):
    text = table.markdown(list(results.values()), [])
    assert text.count("\n**") + text.startswith("**") == 3
    row = next(x for x in text.splitlines() if x.startswith("| kvarn-k2v2-rest-exact"))
    assert report.kl_ratio(results["kvarn-k2v2-rest-exact"], results["kvarn-k2v2"]) in row
    assert "lost" in text and "KL ÷ static's" in text
    written = plot.write(list(results.values()), workdir)
    assert len(written) == 6 and all(path.stat().st_size > 0 for path in written)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [("", {"part": "drif"}, r"config\.part='drif': choose one of drift, paired"),
     ("", {"rows": ("kvarn",)}, r"config\.rows: no 'kvarn' in the grid"),
     ("", {"length": 1000}, r"config\.length=1000: use a multiple of 4 blocks"),
     ("", {"texts": ("a/b", "a/b")}, r"config\.texts: a text stands twice"),
     ("paired", {"regimes": ("dynamic",)}, r"config\.regimes: 'dynamic'; choose among decode"),
     ("paired", {"block": 64}, r"config\.block=64: a block must be one tile"),
     ("retrieval", {"retrieval.batch": 0}, r"config\.retrieval\.batch=0: use 1 or more"),
     ("retrieval", {"tasks.passkey.tokens": 0}, r"config\.tasks\.passkey: tokens: 0")],
)  # fmt: skip
def test_impossible_combinations(part, change, message):
    config = with_overrides(config_module(CONFIG)[0].get_config(part), change)
    with pytest.raises(ValueError, match=message):
        rows.validate(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"share": 0.001, "which": "worst"}, "share=0.001 of tile=128 must be 1 token or more"),
     ({"share": 0.05, "which": "best"}, "exact_tokens.which='best': choose one of worst, rest")],
)  # fmt: skip
def test_impossible_patches(change, message):
    config = config_module(CONFIG)[0].get_config()
    config.grid["kvarn-k2v2-worst-exact"].exact_tokens = change
    with pytest.raises(ValueError, match=message):
        rows.points(config)
