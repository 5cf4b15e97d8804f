"""A decoder's config from the metadata of a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.io.files import FileError, quote
from kvjax.io.gguf_header import GgufTensor
from kvjax.models.config import DecoderConfig, config_from_hf

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}


class _Metadata:
    """The metadata of one architecture: `get("block_count")` reads "llama.block_count"."""

    def __init__(self, path: Path, data: Mapping[str, Any], architecture: str):
        self.path, self.data, self.architecture = path, data, architecture

    def get(self, name: str, default: Any = None) -> Any:
        key = f"{self.architecture}.{name}"
        value = self.data.get(key, default)
        if value is None:
            raise FileError(self.path, f"metadata key {key} is missing")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FileError(
                self.path, f"metadata key {self.architecture}.{name}: {quote(value)} is no number"
            )
        # Files hold float32: 1e-5 comes back as 9.99999975e-06. The shortest decimal is meant.
        return value if isinstance(value, int) else float(str(np.float32(value)))


def gguf_config(
    path: Path,
    data: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    rope_factors: np.ndarray | None,
) -> DecoderConfig:
    """The config; FileError names the metadata key that is missing, absurd or not supported.

    `rope_factors` [D/2]: what each rotary frequency is divided by, for llama3's scaling.
    """
    architecture = data.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise FileError(path, f"general.architecture: {quote(architecture)} is none of {known}")
    m = _Metadata(path, data, architecture)
    try:
        return config_from_hf(_as_hf(m, tensors, rope_factors))
    except FileError:
        raise
    except ValueError as error:
        raise FileError(path, f"metadata of {architecture}: {error}") from None


def _as_hf(
    m: _Metadata, tensors: Mapping[str, GgufTensor], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    if "token_embd.weight" not in tensors:
        raise FileError(m.path, "missing", tensor="token_embd.weight")
    heads, hidden = m.number("attention.head_count"), m.number("embedding_length")
    head_dim = m.number("attention.key_length", hidden // heads if heads else 0)
    for name in ("rope.dimension_count", "attention.value_length"):
        if m.number(name, head_dim) != head_dim:
            raise FileError(m.path, f"{m.architecture}.{name}: must equal the head's {head_dim}")
    config = {
        "model_type": ARCHITECTURES[m.architecture],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": m.number("feed_forward_length"),
        "num_hidden_layers": m.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": m.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": m.number("context_length"),
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": m.architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_theta": m.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(m, rope_factors, int(head_dim)),
        "bos_token_id": m.data.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            m.data[key]
            for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            if key in m.data
        ],
        "pad_token_id": m.data.get("tokenizer.ggml.padding_token_id"),
    }
    return config | (_gemma3(m, head_dim) if m.architecture == "gemma3" else {})


def _gemma3(m: _Metadata, head_dim: float) -> dict[str, Any]:
    # llama.cpp itself knows these by heart: every sixth layer is full, the sliding ones rotate
    # with base 10,000, and the 27B model (62 layers) alone has another scale than head_dim ** -0.5.
    scalar = head_dim
    if m.number("block_count") == 62:
        scalar = m.number("embedding_length") // m.number("attention.head_count")
    pattern = m.get("attention.sliding_window_pattern", 6)
    config = {
        "query_pre_attn_scalar": scalar,
        "sliding_window": m.number("attention.sliding_window"),
        "rope_local_base_freq": m.number("rope.freq_base_swa", 10000.0),
        "rope_theta": m.number("rope.freq_base", 1e6),
        "final_logit_softcapping": m.data.get("gemma3.final_logit_softcapping"),
    }
    if isinstance(pattern, np.ndarray):  # one flag a layer
        flags = pattern.tolist()[: int(m.number("block_count"))]
        types = ["sliding_attention" if flag else "full_attention" for flag in flags]
        return config | {"layer_types": types}
    return config | {"sliding_window_pattern": pattern}


def _rope_scaling(m: _Metadata, factors: np.ndarray | None, head_dim: int) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3(m, factors, head_dim)
    kind = m.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        key = f"{m.architecture}.rope.scaling.type"
        raise FileError(m.path, f"{key}: {quote(kind)} is none of none, linear, yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": m.number("rope.scaling.factor")}
    if kind == "yarn":
        original = m.number("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if f"{m.architecture}.rope.scaling.{theirs}" in m.data:
                scaling[ours] = m.number(f"rope.scaling.{theirs}")
    return scaling


def _llama3(m: _Metadata, factors: np.ndarray, head_dim: int) -> dict[str, Any]:
    """The scaling whose factors these are: the file keeps only the factors, not the parameters."""
    base = m.number("rope.freq_base", 10000.0)
    if factors.shape != (head_dim // 2,) or not np.all(factors >= 1) or not base > 1:
        raise FileError(
            m.path, f"{quote(factors.shape)} values of which each should be 1 or more",
            tensor="rope_freqs.weight",
        )  # fmt: skip
    scaling: dict[str, Any] = {
        "rope_type": "llama3", "factor": float(factors.max()),
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    angle = base ** (-np.arange(0, head_dim, 2) / head_dim)
    for original in (2**n for n in range(5, 24)):
        keep = np.clip((original * angle / (2 * np.pi) - 1.0) / 3.0, 0.0, 1.0)
        expected = 1 / (keep + (1 - keep) / scaling["factor"])
        if np.allclose(factors, expected, rtol=1e-4):
            return scaling | {"original_max_position_embeddings": original}
    raise FileError(
        m.path, "are no llama3 scaling of low 1, high 4 and a power of two",
        tensor="rope_freqs.weight",
    )  # fmt: skip
