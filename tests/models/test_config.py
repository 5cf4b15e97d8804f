"""Configs of seven families: both spellings, the shapes they imply, ropes, refusals."""

import json
import math
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from kvjax.models.config import (
    DecoderConfig,
    LayerConfig,
    RopeConfig,
    config_from_hf,
    config_to_hf,
    tensor_shapes,
)
from tests.golden.hf.reference import FOLDER, NAMES


def read(name: str, legacy: bool = False) -> dict[str, Any]:
    return json.loads((FOLDER / name / f"config{'_legacy' * legacy}.json").read_text())


def llama(**changes: Any) -> dict[str, Any]:
    return read("llama", legacy=True) | changes


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_give_one_config_and_it_survives_writing(name: str) -> None:
    config = config_from_hf(read(name))
    assert config_from_hf(read(name, legacy=True)) == config
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
    assert hash(config) == hash(config_from_hf(read(name)))


@pytest.mark.parametrize("name", NAMES)
def test_tensor_shapes_are_those_of_the_weights(name: str) -> None:
    with safe_open(FOLDER / name / "model.safetensors", "np") as file:
        real = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    assert tensor_shapes(config_from_hf(read(name))) == real


def test_values_that_set_the_families_apart() -> None:
    gemma2, gemma3 = config_from_hf(read("gemma2")), config_from_hf(read("gemma3_text"))
    assert [layer.window for layer in gemma2.layers] == [8, None, 8, None]
    assert gemma2.attention_scale == pytest.approx(24**-0.5)
    assert (gemma2.attention_softcap, gemma2.final_softcap) == (4.0, 5.0)
    assert gemma2.embed_scale == pytest.approx(math.sqrt(48)) and gemma2.norm_offset == 1.0
    assert [layer.window for layer in gemma3.layers] == [9, 9, None, 9]
    local, far = RopeConfig(theta=1e4), RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert [layer.rope for layer in gemma3.layers] == [local, local, far, local]
    assert gemma3.qk_norm and gemma3.attention_softcap is None
    qwen2, qwen3 = config_from_hf(read("qwen2")), config_from_hf(read("qwen3"))
    assert qwen2.qkv_bias and not qwen2.o_bias and qwen2.head_dim == 8
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim * qwen3.num_heads != 48
    smollm3 = config_from_hf(read("smollm3"))
    assert [layer.rope is None for layer in smollm3.layers] == [False, True, False, True]
    assert [layer.window for layer in config_from_hf(read("mistral")).layers] == [8, 8, 8]


def test_patterns_of_checkpoints_without_layer_types() -> None:
    qwen2 = read("qwen2", legacy=True) | {"sliding_window": 16, "max_window_layers": 1}
    assert not any(layer.window for layer in config_from_hf(qwen2).layers)
    slides = config_from_hf(qwen2 | {"use_sliding_window": True})
    assert [layer.window for layer in slides.layers] == [None, 16, 16]
    assert config_from_hf(config_to_hf(slides)) == slides
    gemma3 = read("gemma3_text", legacy=True) | {"num_hidden_layers": 7}
    windows = [layer.window for layer in config_from_hf(gemma3).layers]
    assert windows == [9, 9, None, 9, 9, None, 9]
    smollm3 = read("smollm3", legacy=True)
    del smollm3["no_rope_layers"]
    rotated = [layer.rope is not None for layer in config_from_hf(smollm3).layers]
    assert rotated == [True, False, True, False]
    full = read("mistral", legacy=True) | {"sliding_window": None}
    assert [layer.window for layer in config_from_hf(full).layers] == [None] * 3


def test_the_text_part_of_a_published_gemma3() -> None:
    """Published files leave out what equals the class's default, and nest the text part."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    config = config_from_hf({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text})
    assert (config.family, config.num_heads, config.num_kv_heads) == ("gemma3", 8, 4)
    assert (config.head_dim, config.vocab_size, config.eos_ids) == (256, 262208, (1, 106))
    assert [i for i, layer in enumerate(config.layers) if not layer.window] == [5, 11, 17, 23, 29]
    assert config.layers[5].rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert config.layers[0] == LayerConfig(window=1024, rope=RopeConfig(theta=1e4))


LOW = [1.0, 0.23713736, 0.056234129]
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
YARN_TAIL = [0.0090012699, 0.0011067971, 1.8747354e-05, 4.4456983e-06, 1.0542414e-06]
ROPES = [  # computed with transformers 5.24.0: theta 1e5, head_dim 16, 8,192 positions
    (None, [*LOW, 0.013335215, 0.0031622779, 0.00074989418, 0.00017782794, 4.2169653e-05], 1.0),
    ({"rope_type": "linear", "factor": 4.0},
     [0.25, 0.059284341, 0.014058532, 0.0033338037, 0.00079056947, 0.00018747355, 4.4456985e-05,
      1.0542413e-05], 1.0),
    ({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 512},
     [*LOW, 0.00078985922, 9.8821183e-05, 2.3434193e-05, 5.5571231e-06, 1.3178017e-06], 1.0),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 16,
      "beta_slow": 2},
     [*LOW, 0.0083345091, 0.00079056947, 0.00018747355, 4.4456985e-05, 1.0542413e-05],
     1.138629436111989),
    (YARN | {"truncate": False},
     [*LOW, 0.0084462361, 0.00072263833, *YARN_TAIL[2:]], 1.3688879454113936),
    (YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, LOW + YARN_TAIL, 1.1557219901962608),
    (YARN | {"attention_factor": 1.7}, LOW + YARN_TAIL, 1.7),
    ({"rope_type": "yarn", "factor": 2.0},
     [*LOW, 0.011112679, 0.0021081851, 0.00037494709, 8.891397e-05, 2.1084827e-05],
     1.0693147180559945),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "expected", "factor"), ROPES)
def test_rope_scalings_equal_transformers(
    scaling: dict[str, Any] | None, expected: list[float], factor: float
) -> None:
    data = llama(rope_scaling=scaling, head_dim=16, max_position_embeddings=8192)
    config = config_from_hf(data)
    rope = config.layers[0].rope
    assert rope is not None
    frequencies, on_cos_and_sin = rope.inverse_frequencies(16)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert on_cos_and_sin == pytest.approx(factor, rel=1e-12)
    assert config_from_hf(config_to_hf(config)) == config


REFUSED = [
    ("model_type", {"model_type": "gpt_neox"}),
    ("model_type", {"model_type": ["llama"]}),
    ("hidden_size", {"hidden_size": 0}),
    ("hidden_size", {"hidden_size": "72"}),
    ("hidden_size", {"hidden_size": 10**400}),
    ("num_hidden_layers", {"num_hidden_layers": 10**9}),
    ("num_hidden_layers", {"num_hidden_layers": True}),
    ("vocab_size", {"vocab_size": -1}),
    ("vocab_size", {"vocab_size": None}),
    ("num_key_value_heads", {"num_key_value_heads": 2}),
    ("head_dim", {"head_dim": 7}),
    ("head_dim", {"head_dim": None, "hidden_size": 73}),
    ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
    ("rms_norm_eps", {"rms_norm_eps": -1e-5}),
    ("rope_theta", {"rope_theta": float("inf")}),
    ("rope_theta", {"rope_theta": 1.0}),
    ("rope_type", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
    ("rope_type", {"rope_scaling": {"rope_type": {}}}),
    ("factor", {"rope_scaling": {"rope_type": "linear"}}),
    ("high_freq_factor", {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}}),
    ("rope_scaling", {"rope_scaling": [1]}),
    ("rope_parameters", {"rope_parameters": "default"}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("hidden_act", {"hidden_act": "relu"}),
    ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
    ("eos_token_id", {"eos_token_id": [1, "2"]}),
    ("quantization_config", {"quantization_config": {"bits": 4}}),
    ("layer_types", {"model_type": "gemma2", "layer_types": ["full_attention"],
                     "sliding_window": 8}),
    ("layer_types", {"model_type": "gemma2", "layer_types": ["chunked_attention"] * 3}),
    ("no_rope_layers", {"model_type": "smollm3", "no_rope_layers": [0, 1]}),
    ("sliding_window", {"model_type": "mistral", "sliding_window": 0}),
    ("text_config", {"model_type": "gemma3", "text_config": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "changes"), REFUSED)
def test_absurd_values_are_refused_by_key(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=key) as caught:
        config_from_hf(llama(**changes))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_config_without_spelling_in_its_family_is_not_written() -> None:
    config = config_from_hf(read("mistral"))
    layers = (LayerConfig(window=4), *config.layers[1:])
    mixed = DecoderConfig(**{**vars(config), "layers": layers})
    with pytest.raises(ValueError, match="mistral cannot express"):
        config_to_hf(mixed)


def test_missing_attention_scale_is_that_of_the_head() -> None:
    config = config_from_hf(read("qwen3"))
    assert config.attention_scale == 32**-0.5
