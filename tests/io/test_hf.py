"""Hugging Face folders: load, save, load is bit-identical; what does not fit is named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.io.files import FileError
from kvjax.io.hf import load_config, load_folder, save_folder
from tests.golden.hf.reference import FOLDER, NAMES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the untied model, to be damaged."""
    return Path(shutil.copytree(FOLDER / "llama_rope_llama3", tmp_path / "model"))


def change(folder: Path, name: str, value: np.ndarray | None) -> None:
    tensors = {k: v.copy() for k, v in load_file(folder / "model.safetensors").items()}
    tensors.pop(name, None)
    save_file(tensors | ({} if value is None else {name: value}), folder / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_load_save_load_is_bit_identical(name: str, tmp_path: Path) -> None:
    config, tensors, tokenizer = load_folder(FOLDER / name)
    assert tokenizer is None
    save_folder(tmp_path / "copy", config, tensors, max_shard_bytes=200_000)
    again, copies, _ = load_folder(tmp_path / "copy")
    original = load_file(FOLDER / name / "model.safetensors")
    assert again == config and copies.keys() == original.keys()
    for key, value in original.items():
        assert copies[key].dtype == value.dtype
        np.testing.assert_array_equal(copies[key], value)
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]  # nothing partial stays behind


def test_dtype_on_request() -> None:
    _, tensors, _ = load_folder(FOLDER / "llama", dtype="bfloat16")
    assert {t.dtype.name for t in tensors.values()} == {"bfloat16"}
    with pytest.raises(ValueError, match="dtype: 'int8'"):
        load_folder(FOLDER / "llama", dtype="int8")


def test_sixteen_bit_weights_keep_their_dtype(tmp_path: Path) -> None:
    config, tensors, _ = load_folder(FOLDER / "llama", dtype="float16")
    save_folder(tmp_path / "half", config, tensors)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"
    assert load_folder(tmp_path / "half")[1]["model.norm.weight"].dtype == np.float16


NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "missing"),
        (np.zeros((32, 63), np.float32), r"shape \(32, 63\), the config says \(32, 64\)"),
        (np.zeros((32, 64), np.int32), "dtype 'I32'"),
        (np.zeros((32, 64), np.float64), "dtype 'F64'"),
    ],
)
def test_a_tensor_that_does_not_fit(value: np.ndarray | None, message: str, folder: Path) -> None:
    change(folder, NAME, value)
    with pytest.raises(FileError, match=rf"model.*tensor '{NAME}': {message}"):
        load_folder(folder)


def test_unknown_tensors_are_refused_and_harmless_ones_left_out(folder: Path) -> None:
    change(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(8, np.float32))
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in load_folder(folder)[1]
    change(folder, "model.layers.3.mlp.up_proj.weight", np.ones((2, 2), np.float32))
    with pytest.raises(FileError, match=r"tensor 'model.layers.3.*no place for it"):
        load_folder(folder)


def test_a_tied_model_may_repeat_its_head(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER / "llama", tmp_path / "model"))
    change(folder, "lm_head.weight", np.zeros((256, 72), np.float32))
    assert "lm_head.weight" not in load_folder(folder)[1]


def test_the_decoder_inside_a_vision_model(tmp_path: Path) -> None:
    text = json.loads((FOLDER / "gemma3_text" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    tensors = load_file(FOLDER / "gemma3_text" / "model.safetensors")
    for before, after in (("", "language_model."), ("model.", "model.language_model.")):
        renamed = {after + key.removeprefix(before): value for key, value in tensors.items()}
        renamed["vision_tower.x.weight"] = np.zeros(3, np.float32)
        save_file(renamed, tmp_path / "model.safetensors")
        _, loaded, _ = load_folder(tmp_path)
        assert loaded.keys() == tensors.keys()
    save_file(renamed | tensors, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="is there twice"):
        load_folder(tmp_path)


def test_a_damaged_config_is_named(folder: Path) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"num_hidden_layers": 10**12}))
    with pytest.raises(FileError, match=r"config.json: num_hidden_layers: 1000000000000 is not"):
        load_folder(folder)
    for text in ("", "[]", "{" * 5000, '{"model_type": "llama", "model_type": "llama"}', "\udcff"):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(FileError, match="config.json: "):
            load_config(path)
    path.unlink()
    with pytest.raises(FileError, match="config.json: no such file"):
        load_folder(folder)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    config, tensors, _ = load_folder(FOLDER / "llama")
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileError, match="not an empty folder"):
        save_folder(tmp_path, config, tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_that_failed_does_not_appear(tmp_path: Path) -> None:
    config, tensors, _ = load_folder(FOLDER / "llama")
    short = {name: tensors[name] for name in list(tensors)[:-1]}
    with pytest.raises(FileError, match=r"tensor 'model.norm.weight': missing"):
        save_folder(tmp_path / "out", config, short)
    assert not list(tmp_path.iterdir())
