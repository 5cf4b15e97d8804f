"""A soft row of the head-to-head: blocks that were read are soft tokens from then on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments import points, table
from experiments.args import config_module
from kvjax.data import load_text
from kvjax.models.decoder import embed
from kvjax.soft import SoftConfig, add_memory_rows, encode_context, new_model, prompt, save
from kvjax.soft.encoder import first_layers
from tests.experiments.conftest import CONFIG


@pytest.fixture(scope="module")
def compressor(tiny_model, tmp_path_factory):
    """One of random weights, ratio 8, made of the tiny model."""
    base, words = kvjax.load(tiny_model)
    decoder, markers = add_memory_rows(base)
    settings = SoftConfig(*markers, ratios=(8,), window=32)
    model = new_model(first_layers(base, 1), decoder, settings)
    folder = tmp_path_factory.mktemp("compressor")
    save(model, folder, words, words)
    return model, str(folder)


@pytest.fixture
def config(tiny_config, compressor):
    tiny_config.compressor, tiny_config.rows = compressor[1], ("exact", "soft-8")
    tiny_config.grid = config_module(CONFIG)[0].get_config("soft").grid
    return tiny_config


def test_each_block_reads_the_soft_tokens_of_those_before_it(config, compressor, tmp_path):
    study = points.study(config)
    study.validate(config)
    assert points.finish(points.run_all(study.points(config), tmp_path)) == 0
    found = {each.name: each.result for each in table.load(tmp_path)}["soft-8"]
    model, words = compressor[0], kvjax.load(config.model)[1]
    behind = config.length - config.block
    for name, nll in zip(config.texts, found["blocks"]["nll"], strict=True):
        ids = words.encode(load_text(name).text)[: config.length + 1]
        blocks = [ids[at : at + config.block] for at in range(0, behind, config.block)]
        soft = encode_context(model, blocks, 8).documents
        before = prompt(model, list(soft))
        inputs = jnp.concatenate(
            [before, embed(model.decoder, jnp.asarray([ids[behind:-1]]))], axis=1
        )
        cache = kvjax.init_cache(model.decoder, kvjax.cache(), 1, inputs.shape[1])
        logits, _ = kvjax.step(model.decoder, inputs, cache)
        log_p = jax.nn.log_softmax(logits[0, before.shape[1] :, : model.config.memory_start])
        wanted = -np.take_along_axis(np.asarray(log_p), np.array(ids[behind + 1 :])[:, None], 1)
        assert nll[-1] == pytest.approx(float(wanted.mean()), rel=1e-4)
    assert found["size"]["bytes"] < found["size"]["exact_bytes"]


def test_a_soft_row_needs_its_compressor(config):
    config.compressor = "nowhere"
    with pytest.raises(ValueError, match=r"config\.compressor='nowhere'.*configs/lclm\.py:smollm2"):
        points.study(config).points(config)


def test_a_ratio_that_the_compressor_does_not_serve(config):
    config.rows = ("soft-4",)
    with pytest.raises(ValueError, match=r"config\.grid\.soft-4\.soft=4: .* compresses by 8"):
        points.study(config).points(config)


def test_only_the_soft_variant_has_rows_that_need_a_compressor():
    module, _ = config_module(CONFIG)
    for variant, soft in (("", False), ("soft", True)):
        assert any("soft" in row for row in module.get_config(variant).grid.values()) is soft
