"""A compressor as a folder: two Hugging Face folders, the adapter, and the settings.

encoder/  decoder/  adapter.safetensors  soft.json
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from kvjax.io.files import FileError, new_folder, quote, read_json, write_json
from kvjax.io.hf import load_config, load_folder, save_folder
from kvjax.io.shards import read_file, read_folder
from kvjax.io.tensors import DTYPES, LazyTensors, StoredTensor, select_tensors
from kvjax.io.tokenizer import Tokenizer, load_tokenizer
from kvjax.models.decoder import Decoder
from kvjax.soft.adapter import Adapter, adapter_shapes
from kvjax.soft.config import SoftConfig
from kvjax.soft.model import LCLM

SETTINGS, ADAPTER = "soft.json", "adapter.safetensors"


class Loaded(NamedTuple):
    """A compressor and its tokenizers; None where a folder has none."""

    model: LCLM
    encoder_tokenizer: Tokenizer | None
    tokenizer: Tokenizer | None


def save(
    model: LCLM,
    folder: Path | str,
    encoder_tokenizer: Tokenizer | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a folder (which must be new or empty) that `load` reads; it appears once complete.

    encoder/ and decoder/ are ordinary Hugging Face folders.
    """
    with new_folder(Path(folder)) as partial:
        for name, stack, words in (
            ("encoder", model.encoder, encoder_tokenizer),
            ("decoder", model.decoder, tokenizer),
        ):
            save_folder(partial / name, stack.config, stack.tensors(), words)
        save_file(model.adapter.tensors(), partial / ADAPTER)
        write_json(partial / SETTINGS, dataclasses.asdict(model.config))


def load(folder: Path | str, dtype: str = "float32") -> Loaded:
    """A compressor that `save` wrote, its weights in `dtype`.

    Raises:
      FileError: names the file, and the tensor or key, at fault.
    """
    folder = Path(folder)
    config = load_settings(folder)
    encoder, encoder_tokenizer = load_encoder(folder / "encoder", dtype)
    decoder_config, tensors, tokenizer = load_folder(folder / "decoder")
    stored = read_file(folder / ADAPTER)
    shapes = adapter_shapes(config, encoder.config, decoder_config)
    _check(folder / ADAPTER, stored, shapes)
    adapter = Adapter(config, encoder.config, decoder_config, LazyTensors(stored), dtype)
    decoder = Decoder(decoder_config, tensors, dtype)
    return Loaded(LCLM(encoder, adapter, decoder, config), encoder_tokenizer, tokenizer)


def load_encoder(folder: Path | str, dtype: str = "float32") -> tuple[Decoder, Tokenizer | None]:
    """An encoder from any Hugging Face decoder's folder, with or without its head.

    Embedding models are saved without the `model.` before their tensors' names; both are read.
    """
    folder = Path(folder)
    config = dataclasses.replace(load_config(folder), tie_embeddings=True)
    stored = read_folder(folder)
    if "embed_tokens.weight" in stored:
        stored = {f"model.{name}": tensor for name, tensor in stored.items()}
    tensors = LazyTensors(select_tensors(folder, config, stored))
    return Decoder(config, tensors, dtype), load_tokenizer(folder, config.eos_ids)


def load_settings(folder: Path | str) -> SoftConfig:
    """The settings alone of a compressor that `save` wrote; FileError where they are none."""
    path = Path(folder) / SETTINGS
    data = read_json(path)
    known = {field.name for field in dataclasses.fields(SoftConfig)}
    if unknown := sorted(data.keys() - known):
        raise FileError(path, f"{quote(unknown[0])} is no setting")
    if isinstance(data.get("ratios"), list):
        data["ratios"] = tuple(data["ratios"])
    try:
        return SoftConfig(**data)
    except (TypeError, ValueError) as error:
        raise FileError(path, str(error)) from None


def _check(
    path: Path, stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in shapes.items():
        if name not in stored:
            raise FileError(path, "missing", tensor=name)
        if stored[name].shape != shape or stored[name].dtype not in DTYPES:
            found = stored[name]
            raise FileError(path, f"{found.dtype} {quote(found.shape)}, the settings say {shape}",
                            tensor=name)  # fmt: skip


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Named arrays as one safetensors file, which appears only once complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
