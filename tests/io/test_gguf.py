"""GGUF files: the same config and weights as the Hugging Face folder they were made from."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

from kvjax.io.files import FileError
from kvjax.io.gguf import TYPES, load_gguf
from kvjax.io.hf import load_folder, save_folder
from kvjax.models.config import DecoderConfig, LayerConfig, RopeConfig, tensor_shapes
from tests.golden.hf.reference import FOLDER
from tests.io.samples import converted, interleaved, write_gguf

GOLDEN = ["llama", "llama_rope_llama3", "qwen2", "qwen3", "gemma3_text"]


def tiny(family: str = "llama", **changes: object) -> DecoderConfig:
    values = {
        "family": family, "vocab_size": 32, "hidden_size": 256, "intermediate_size": 256,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "layers": (LayerConfig(),),
        "context": 64, "norm_eps": 1e-5, "bos_id": 1, "eos_ids": (2,), "pad_id": 0,
    }  # fmt: skip
    return DecoderConfig(**(values | changes))  # type: ignore[arg-type]


def weights(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(config).items()
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes}


@pytest.mark.parametrize("name", GOLDEN)
def test_float_files_equal_the_folder(name: str, tmp_path: Path) -> None:
    config, tensors, _ = load_folder(FOLDER / name)
    write_gguf(tmp_path / "m.gguf", config, tensors)
    again, loaded, tokenizer = load_gguf(tmp_path / "m.gguf")
    assert tokenizer is None
    scale = pytest.approx(config.attention_scale)  # the file cannot say gemma's query scalar
    if config.family == "gemma3":
        scale = config.head_dim**-0.5
    assert again.attention_scale == scale
    assert dataclasses.replace(again, attention_scale=config.attention_scale) == config
    assert loaded.keys() == tensors.keys()
    for key, value in tensors.items():
        atol = 3e-7 if config.family == "gemma3" and key.endswith("norm.weight") else 0
        np.testing.assert_allclose(loaded[key], value, rtol=0, atol=atol, err_msg=key)


@pytest.mark.parametrize("kind", [t for t in TYPES if t != "F32"])
def test_every_block_type(kind: str, tmp_path: Path) -> None:
    config = tiny()
    number = GGMLQuantizationType[kind]
    tensors, expected = weights(config), {}
    for name, value in tensors.items():
        if value.ndim == 2 and kind.endswith("_K"):  # no encoder for these: random blocks
            tensors[name] = raw_blocks(value.shape, number)
            value = quants.dequantize(tensors[name], number)
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
            value = half_split(value, heads) if heads else value
        elif value.ndim == 2:  # rows are permuted whole, and blocks lie within rows
            value = quants.dequantize(quants.quantize(value, number), number)
        expected[name] = value
    write_gguf(tmp_path / "m.gguf", config, tensors, kind)
    again, loaded, _ = load_gguf(tmp_path / "m.gguf")
    assert again == config
    for name, value in expected.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(np.float32(loaded[name]), value, err_msg=name)


def raw_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> np.ndarray:
    """Random codes under finite scales: the scales stand first, in Q6_K last."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 256, (shape[0] * shape[1] // block, size), np.uint8)
    scales = np.random.default_rng(2).normal(size=(len(raw), 2)).astype(np.float16)
    if kind == GGMLQuantizationType.Q6_K:
        raw[:, -2:] = scales[:, :1].view(np.uint8)
    else:
        raw[:, :4] = scales.view(np.uint8)
    return raw.reshape(shape[0], -1)


def half_split(w: np.ndarray, heads: int) -> np.ndarray:
    order = interleaved(np.arange(len(w)), heads)  # row i of the file is row order[i] of the model
    return w[np.argsort(order)]


def test_q4_1_and_q6_k_by_hand(tmp_path: Path) -> None:
    """One value each, decoded as the format defines it: the package is not its own judge."""
    config = tiny()
    for kind, size in (("Q4_1", 20), ("Q6_K", 210)):
        tensors = weights(config)
        raw = raw_blocks((32, 256), GGMLQuantizationType[kind])
        tensors["model.embed_tokens.weight"] = raw
        others = {name for name, value in tensors.items() if value.ndim == 2} - {
            "model.embed_tokens.weight"
        }
        for name in others:
            tensors[name] = raw_blocks(tensors[name].shape, GGMLQuantizationType[kind])
        write_gguf(tmp_path / f"{kind}.gguf", config, tensors, kind)
        block = raw[3, :size]
        if kind == "Q4_1":
            scale, low = block[:4].view(np.float16).astype(np.float32)
            value = scale * (block[4 + 5] >> 4) + low  # element 16 + 5: a high half
            at = 21
        else:
            scale = block[208:210].view(np.float16).astype(np.float32)[0]
            code = (block[37] & 15) | ((block[128 + 5] >> 2 & 3) << 4)  # element 32 + 5
            value = scale * np.int8(block[192 + 2].view(np.int8)) * (int(code) - 32)
            at = 37
        loaded = load_gguf(tmp_path / f"{kind}.gguf")[1]["model.embed_tokens.weight"]
        assert loaded[3, at] == pytest.approx(value, rel=1e-6)


def test_query_rows_go_back_to_half_split_order(tmp_path: Path) -> None:
    config = tiny()
    tensors = weights(config)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = np.repeat(np.arange(256, dtype=np.float32)[:, None], 256, 1)
    stored = converted(name, tensors[name], config)[:4, 0]
    assert stored.tolist() == [0, 32, 1, 33]  # pairs side by side in the file
    write_gguf(tmp_path / "m.gguf", config, tensors)
    assert load_gguf(tmp_path / "m.gguf")[1][name][:3, 0].tolist() == [0, 1, 2]


def test_linear_and_yarn_ropes(tmp_path: Path) -> None:
    for rope in (
        RopeConfig(theta=5e5, kind="linear", factor=4.0),
        RopeConfig(theta=5e5, kind="yarn", factor=4.0, original_context=16),
    ):
        config = tiny("qwen2", layers=(LayerConfig(rope=rope),), qkv_bias=True)
        write_gguf(tmp_path / "m.gguf", config, weights(config))
        assert load_gguf(tmp_path / "m.gguf")[0] == config


def test_gemma3_pattern_that_llama_cpp_knows_by_heart(tmp_path: Path) -> None:
    local, far = RopeConfig(theta=1e4), RopeConfig(theta=1e6)
    layers = tuple(
        LayerConfig(None if (i + 1) % 6 == 0 else 16, far if (i + 1) % 6 == 0 else local)
        for i in range(7)
    )
    config = tiny(
        "gemma3", layers=layers, hidden_size=32, intermediate_size=32, head_dim=16, qk_norm=True,
        sandwich_norms=True, norm_offset=1.0, activation="gelu_tanh", embed_scale=32**0.5,
    )  # fmt: skip
    write_gguf(tmp_path / "m.gguf", config, weights(config))
    key = b"gemma3.attention.sliding_window_pattern"
    raw = (tmp_path / "m.gguf").read_bytes()
    assert key in raw
    (tmp_path / "m.gguf").write_bytes(raw.replace(key, key[:-1] + b"x"))
    assert load_gguf(tmp_path / "m.gguf")[0] == config


def test_export_to_a_folder(tmp_path: Path) -> None:
    config = tiny()
    write_gguf(tmp_path / "m.gguf", config, weights(config), "Q8_0")
    _, tensors, _ = load_gguf(tmp_path / "m.gguf")
    save_folder(tmp_path / "out", config, tensors)
    again, copies, _ = load_folder(tmp_path / "out")
    assert again == config
    assert all(np.array_equal(copies[name], tensors[name]) for name in tensors)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = tiny()
    tensors = weights(config)

    def refused(message: str) -> None:
        with pytest.raises(FileError, match=message) as caught:
            load_gguf(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    write_gguf(path, config, tensors, metadata={"llama.rope.scaling.type": "longrope"})
    refused("llama.rope.scaling.type: 'longrope'")
    write_gguf(path, config, tensors, metadata={"llama.block_count": 2})
    refused(r"tensor 'model.layers.1.*': missing")
    write_gguf(path, config, tensors, metadata={"llama.block_count": 1 << 31})
    refused("num_hidden_layers: 2147483648")
    write_gguf(path, config, tensors, metadata={"llama.attention.head_count": "four"})
    refused("llama.attention.head_count: 'four' is no number")
    write_gguf(path, config, tensors, metadata={"llama.rope.dimension_count": 32})
    refused("llama.rope.dimension_count: must equal")
    write_gguf(path, dataclasses.replace(config, family="mistral"), tensors)
    refused("general.architecture: 'mistral'")
    write_gguf(path, config, tensors, "Q5_1")
    refused(r"type Q5_1 is none of")
    name = "model.layers.0.mlp.up_proj.weight"
    write_gguf(path, config, tensors | {name: np.ones((256, 128), np.float32)})
    refused(rf"tensor '{name}': shape \(256, 128\)")
    write_gguf(path, config, {k: v for k, v in tensors.items() if k != name})
    refused(rf"tensor '{name}': missing")
    write_gguf(path, config, tensors | {"model.layers.0.self_attn.q_norm.weight": np.ones(64)})
    refused(r"q_norm.weight': the config has no place")
