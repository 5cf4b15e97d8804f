"""Folders: what is saved is loaded bit for bit, and what is damaged is named."""

import json

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.io.files import FileError
from kvjax.soft import load, load_encoder, new_model, save
from kvjax.soft.encoder import first_layers
from tests.soft.conftest import settings, stacks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    encoder, decoder = stacks()
    lclm = new_model(encoder, decoder, settings(adapter="mlp_attn", ratios=(4, 8), overlap=3))
    path = tmp_path_factory.mktemp("lclm") / "folder"
    save(lclm, path)
    return path, lclm


def edit(folder, target, name, change):
    """A copy of the folder with one tensor file changed."""
    import shutil

    shutil.copytree(folder, target)
    tensors = load_file(target / name)
    change(tensors)
    save_file(tensors, target / name)
    return target


def test_saved_is_loaded(folder):
    path, lclm = folder
    again = load(path)
    assert again.model.config == lclm.config
    assert again.tokenizer is None and again.encoder_tokenizer is None
    for got, wanted in zip(nnx.to_flat_state(nnx.state(again.model, nnx.Param)),
                           nnx.to_flat_state(nnx.state(lclm, nnx.Param)), strict=True):  # fmt: skip
        assert got[0] == wanted[0]
        np.testing.assert_array_equal(got[1][...], wanted[1][...])
    assert kvjax.load(path / "decoder")[0].config == lclm.decoder.config


def test_half_precision(folder):
    state = nnx.to_flat_state(nnx.state(load(folder[0], "bfloat16").model, nnx.Param))
    assert {str(leaf[...].dtype) for _, leaf in state} == {"bfloat16"}


def test_an_embedding_model_names_its_tensors_without_a_prefix(folder, tmp_path):
    path, lclm = folder

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    bare = edit(path / "encoder", tmp_path / "bare", "model.safetensors", rename)
    encoder, _ = load_encoder(bare)
    for name, wanted in lclm.encoder.tensors().items():
        np.testing.assert_array_equal(encoder.tensors()[name], wanted)


def test_a_damaged_adapter_is_named(folder, tmp_path):
    path, _ = folder
    missing = edit(path, tmp_path / "a", "adapter.safetensors", lambda t: t.pop("fc2.bias"))
    with pytest.raises(FileError, match=r"adapter.safetensors: tensor 'fc2.bias': missing"):
        load(missing)
    short = edit(path, tmp_path / "b", "adapter.safetensors",
                 lambda t: t.update({"fc1.bias": np.zeros(3, np.float32)}))  # fmt: skip
    with pytest.raises(FileError, match=r"'fc1.bias': float32 .*the settings say \(64,\)"):
        load(short)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ratio": 4}, "'ratio' is no setting"),
        ({"ratios": [7]}, "use a multiple of the ratio 7"),
        ({"ratios": 4}, "soft.json"),
        ({"window": 32.0}, "whole numbers"),
        ({"overlap": -1}, "whole numbers"),
        ({"pooling": "max"}, "soft.pooling is 'max'"),
    ],
)
def test_wrong_settings_are_named(folder, tmp_path, change, match):
    path = folder[0] / "soft.json"
    target = tmp_path / "soft.json"
    target.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FileError, match=match):
        load(tmp_path)


def test_the_first_layers_of_a_decoder_are_an_encoder():
    _, decoder = stacks()
    encoder = first_layers(decoder, 1)
    assert len(encoder.layers) == 1 and encoder.lm_head is None
    for name, value in encoder.tensors().items():
        np.testing.assert_array_equal(value, decoder.tensors()[name])
    with pytest.raises(ValueError, match="the model has 2 layers"):
        first_layers(decoder, 3)
