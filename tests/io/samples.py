"""Writes GGUF files as llama.cpp's converter would, from Hugging Face weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

from kvjax.models.config import DecoderConfig

NAMES = {  # Hugging Face -> GGUF
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def gguf_name(name: str, family: str) -> str:
    stem, _, end = name.rpartition(".")
    names = GEMMA if family == "gemma3" else NAMES
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{end}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{names[inner]}.{end}"


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the query and key rows of llama."""
    halves = w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:])
    return halves.swapaxes(1, 2).reshape(w.shape)


def converted(name: str, w: np.ndarray, config: DecoderConfig) -> np.ndarray:
    if config.family == "llama" and ".q_proj." in name:
        return interleaved(w, config.num_heads)
    if config.family == "llama" and ".k_proj." in name:
        return interleaved(w, config.num_kv_heads)
    return w + 1 if config.family == "gemma3" and name.endswith("norm.weight") else w


def write_gguf(
    path: Path,
    config: DecoderConfig,
    tensors: Mapping[str, np.ndarray],
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Matrices are stored as `kind` (raw blocks where the array is uint8), vectors as F32."""
    writer = GGUFWriter(path, config.family)
    keys = shape_metadata(config) | dict(metadata or {})
    for key, value in keys.items():
        add(writer, key, value)
    quantization = GGMLQuantizationType[kind]
    for name, value in tensors.items():
        out = gguf_name(name, config.family)
        if value.dtype == np.uint8:
            writer.add_tensor(out, value, raw_dtype=quantization)
        elif value.ndim == 2 and kind != "F32":
            packed = quants.quantize(converted(name, value, config), quantization)
            raw_dtype = None if kind == "F16" else quantization
            writer.add_tensor(out, packed, raw_dtype=raw_dtype)
        else:
            writer.add_tensor(out, converted(name, value, config).astype(np.float32))
    if config.layers[0].rope is not None and config.layers[0].rope.kind == "llama3":
        plain = config.layers[0].rope.theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        factors = plain / config.layers[0].rope.inverse_frequencies(config.head_dim)[0]
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def shape_metadata(c: DecoderConfig) -> dict[str, Any]:
    rope = next(layer.rope for layer in c.layers if layer.rope and layer.window is None)
    keys: dict[str, Any] = {
        "block_count": len(c.layers), "context_length": c.context,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads, "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim, "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.norm_eps, "rope.freq_base": rope.theta,
    }  # fmt: skip
    if rope.kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope.original_context
    if c.family == "gemma3":
        keys["attention.sliding_window"] = c.layers[0].window
        keys["attention.sliding_window_pattern"] = [x.window is not None for x in c.layers]
    keys = {f"{c.family}.{key}": value for key, value in keys.items()}
    keys["tokenizer.ggml.bos_token_id"] = c.bos_id
    keys["tokenizer.ggml.eos_token_id"] = c.eos_ids[0]
    keys["tokenizer.ggml.padding_token_id"] = c.pad_id
    return keys
