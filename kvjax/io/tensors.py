"""Named tensors that are read when asked for, checked against a config before any is."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from kvjax.io.files import FileError, quote
from kvjax.models.config import DecoderConfig, tensor_shapes

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# Parts of a checkpoint that a decoder has no use for: what older code saved beside the weights,
# and the vision half of a vision model.
_HARMLESS = re.compile(
    r".*\.(rotary_emb\.inv_freq|masked_bias|attn\.bias)|(model\.)?vision_tower\..*"
    r"|(model\.)?multi_modal_projector\..*"
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: what its header says, and how to read it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # "float32" | "float16" | "bfloat16", or the file's own name for another
    read: Callable[[], np.ndarray]


class LazyTensors(Mapping[str, np.ndarray]):
    """Read-only mapping from Hugging Face names to arrays; each access reads the file anew.

    `dtype` None leaves every tensor as its file has it.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], dtype: str | None = None):
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype: {dtype!r} is none of {', '.join(DTYPES)}")
        self.stored = dict(stored)
        self.dtype = dtype

    def __getitem__(self, name: str) -> np.ndarray:
        value = self.stored[name].read()
        return value if self.dtype is None else value.astype(DTYPES[self.dtype], copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def select_tensors(
    place: Path, config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors that `config` needs, under their usual names, after checking every one.

    FileError: one is missing, has another shape or a dtype that is no float, or is unknown.
    """
    named = _usual_names(place, stored)
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        if name not in named:
            raise FileError(place, "missing", tensor=name)
        found = named[name]
        if found.shape != shape:
            raise FileError(
                found.file, f"shape {quote(found.shape)}, the config says {shape}", tensor=name
            )
        if found.dtype not in DTYPES:
            raise FileError(
                found.file, f"dtype {quote(found.dtype)} is no float32, float16 or bfloat16",
                tensor=name,
            )  # fmt: skip
    for name in named:
        tied_head = name == "lm_head.weight" and config.tie_embeddings
        if name not in shapes and not tied_head and not _HARMLESS.fullmatch(name):
            raise FileError(named[name].file, "the config has no place for it", tensor=name)
    return {name: named[name] for name in shapes}


def _usual_names(place: Path, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Undoes the prefixes under which vision models keep their decoder."""
    named: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        usual = re.sub(r"^model\.language_model\.", "model.", name)
        usual = re.sub(r"^language_model\.", "", usual)
        if usual in named:
            raise FileError(tensor.file, "is there twice", tensor=usual)
        named[usual] = tensor
    return named
