"""GGUF files (llama.cpp's format): config, weights and tokenizer, as a Hugging Face folder's.

The weights come under Hugging Face names, in Hugging Face layout: query and key rows of `llama`
files are put back from interleaved to half-split order, Gemma's norms lose the 1 that the file has
already added to them. Quantized blocks are decoded to float32 when a tensor is asked for.
"""

import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.quants import dequantize

from kvjax.io.files import FileError
from kvjax.io.gguf_config import gguf_config
from kvjax.io.gguf_header import GgufTensor, read_header
from kvjax.io.gguf_tokenizer import gguf_tokenizer
from kvjax.io.tensors import LazyTensors, StoredTensor, select_tensors
from kvjax.io.tokenizer import Tokenizer
from kvjax.models.config import DecoderConfig

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K")
_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def load_gguf(
    path: Path | str, dtype: str | None = None
) -> tuple[DecoderConfig, LazyTensors, Tokenizer | None]:
    """Config, weights by Hugging Face name and tokenizer of a `llama`, `qwen2`, `qwen3` or
    `gemma3` file; the tokenizer is None where the file has none.

    FileError names file and tensor (or metadata key) of whatever is damaged or not supported.
    """
    path = Path(path)
    metadata, found = read_header(path)
    config = gguf_config(path, metadata, found, _rope_factors(path, found))
    stored = {}
    for name, tensor in found.items():
        usual = _usual_name(path, name, config.family)
        stored[usual] = _stored(path, tensor, usual, config)
    tensors = LazyTensors(select_tensors(path, config, stored), dtype)
    return config, tensors, gguf_tokenizer(path, metadata, config)


def _rope_factors(path: Path, found: dict[str, GgufTensor]) -> np.ndarray | None:
    """What llama3's rope scaling divides each frequency by: these files hold it as a tensor."""
    tensor = found.pop("rope_freqs.weight", None)
    if tensor is None:
        return None
    if tensor.kind.name != "F32":
        raise FileError(path, f"type {tensor.kind.name}, not F32", tensor=tensor.name)
    return _read(path, tensor)


def _usual_name(path: Path, name: str, family: str) -> str:
    inner = _INNER | _GEMMA if family == "gemma3" else _INNER
    if name in _OUTER:
        return _OUTER[name]
    found = re.fullmatch(r"blk\.(0|[1-9][0-9]*)\.([a-z_]+)\.(weight|bias)", name)
    if found and found[2] in inner:
        return f"model.layers.{found[1]}.{inner[found[2]]}.{found[3]}"
    raise FileError(path, f"a {family} file has no such tensor", tensor=name)


def _stored(path: Path, tensor: GgufTensor, usual: str, config: DecoderConfig) -> StoredTensor:
    if tensor.kind.name not in TYPES:
        raise FileError(
            path, f"type {tensor.kind.name} is none of {', '.join(TYPES)}", tensor=tensor.name
        )
    change = _layout_change(usual, config)
    dtype = np.dtype(_PLAIN.get(tensor.kind.name, np.float32)).name
    return StoredTensor(path, tensor.shape, dtype, lambda: change(_read(path, tensor)))


def _layout_change(usual: str, config: DecoderConfig) -> Callable[[np.ndarray], np.ndarray]:
    if config.family == "gemma3" and usual.endswith("norm.weight"):
        return lambda w: w - np.ones((), w.dtype)
    if config.family == "llama" and ".self_attn.q_proj." in usual:
        return lambda w: _half_split(w, config.num_heads)
    if config.family == "llama" and ".self_attn.k_proj." in usual:
        return lambda w: _half_split(w, config.num_kv_heads)
    return lambda w: w


def _half_split(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs side by side (0, D/2, 1, D/2+1, ...) to the usual order."""
    pairs = w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:])
    return pairs.swapaxes(1, 2).reshape(w.shape)


def _read(path: Path, tensor: GgufTensor) -> np.ndarray:
    data = np.memmap(path, np.uint8, "r", tensor.first, (tensor.last - tensor.first,))
    raw = np.asarray(data)
    if tensor.kind.name in _PLAIN:
        return raw.view(_PLAIN[tensor.kind.name]).reshape(tensor.shape)
    rows = raw.reshape(*tensor.shape[:-1], -1)
    with np.errstate(all="ignore"):  # a scale may be infinite; the values then say so themselves
        return dequantize(rows, tensor.kind).reshape(tensor.shape)
