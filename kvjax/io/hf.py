"""Hugging Face folders: config.json, safetensors, tokenizer.json."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvjax.io import shards
from kvjax.io.files import FileError, file_size, new_folder, read_json, write_json
from kvjax.io.tensors import LazyTensors, select_tensors
from kvjax.io.tokenizer import Tokenizer, load_tokenizer
from kvjax.models.config import DecoderConfig, config_from_hf, config_to_hf


def load_config(path: Path | str) -> DecoderConfig:
    """The config of a config.json, or of the folder that holds one. FileError names the key."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    data = read_json(path)
    try:
        return config_from_hf(data)
    except ValueError as error:
        raise FileError(path, str(error)) from None


def load_folder(
    folder: Path | str, dtype: str | None = None
) -> tuple[DecoderConfig, LazyTensors, Tokenizer | None]:
    """Config, weights by Hugging Face name and tokenizer (None where there is none) of a folder.

    The weights stay in the file until they are asked for, in `dtype` if one is named. FileError
    names file and tensor of whatever is missing, damaged or not what the config says.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError(folder, "no such folder")
    config = load_config(folder)
    stored = select_tensors(folder, config, shards.read_folder(folder))
    return config, LazyTensors(stored, dtype), load_tokenizer(folder, config.eos_ids)


def save_folder(
    folder: Path | str,
    config: DecoderConfig,
    tensors: Mapping[str, np.ndarray],
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes what transformers and `load_folder` read; the folder appears only once complete.

    `tensors` by Hugging Face name, in the dtypes to store. FileError where the folder already
    holds something.
    """
    folder = Path(folder)
    data = config_to_hf(config)
    with new_folder(folder) as partial:
        shards.write_folder(partial, tensors, max_shard_bytes)
        # Written, then checked as any stranger's file is: what cannot be loaded is never left.
        stored = select_tensors(folder, config, shards.read_folder(partial))
        data["torch_dtype"] = stored["model.embed_tokens.weight"].dtype
        write_json(partial / "config.json", data)
        if tokenizer is not None:
            tokenizer.save(partial)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    if file_size(path) < 4:
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
