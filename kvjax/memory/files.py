"""Adapters and states on disk."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.cache.segments import ModelCache
from kvjax.memory.attach import memory_config, states, tensors, with_states
from kvjax.memory.config import DeltaMemConfig, config_from_json, config_to_json
from kvjax.memory.torch_file import read_tensors

CONFIG = "delta_mem_config.json"
ADAPTER, RELEASED = "delta_mem_adapter.safetensors", "delta_mem_adapter.pt"
MATRICES = "matrices"


def save_adapter(folder: str | Path, model: Any) -> None:
    """Writes the memory's weights, under the original's names, and its config beside them.

    The frozen model is not written.

    Raises:
      ValueError: where the model has no memory.
    """
    config, folder = memory_config(model), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / ADAPTER, tensors(model), {"format": "pt"})
    text = json.dumps(config_to_json(config), indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def load_adapter(folder: str | Path) -> tuple[DeltaMemConfig, dict[str, np.ndarray]]:
    """An adapter's config and weights, for `attach`.

    Reads what `save_adapter` writes, and a released adapter as it is: `delta_mem_adapter.pt`
    beside its config (see `torch_file`).

    Raises:
      ValueError: naming the file, where one is missing, damaged or of an unsupported kind.
    """
    folder = Path(folder)
    try:
        data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: cannot be read: {str(error)[:120]}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{folder / CONFIG}: does not hold a JSON object")
    try:
        config = config_from_json(data)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None
    if (folder / ADAPTER).exists():
        return config, _load(folder / ADAPTER)[0]
    if (folder / RELEASED).exists():
        return config, read_tensors(folder / RELEASED)
    raise ValueError(f"{folder}: holds neither {ADAPTER} nor {RELEASED}")


def save_state(path: str | Path, cache: ModelCache) -> None:
    """Writes the memories of a cache, and nothing of its entries: L · B · N · r² numbers."""
    held = states(cache)
    layers = [i for i, state in enumerate(held) if state is not None]
    matrices = np.stack([np.asarray(state.matrix) for state in held if state is not None])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    _save(Path(path), {MATRICES: matrices}, {"layers": json.dumps(layers)})


def load_state(path: str | Path, cache: ModelCache) -> ModelCache:
    """The cache with the memories of a file, its entries as they are.

    With an empty cache, the conversation goes on with its memory alone; whether chunks write stays
    as the cache has it.

    Raises:
      ValueError: for a damaged file, or memories of other layers or shapes than the cache's.
    """
    path, held = Path(path), states(cache)
    found, about = _load(path)
    layers = [i for i, state in enumerate(held) if state is not None]
    if MATRICES not in found or about.get("layers") != json.dumps(layers):
        raise ValueError(f"{path}: holds memories of layers {about.get('layers')}, the model has "
                         f"them at {layers}")  # fmt: skip
    shape = (len(layers), *next(s.matrix.shape for s in held if s is not None))
    if found[MATRICES].shape != shape:
        raise ValueError(f"{path}: memories have shape {found[MATRICES].shape}, the cache wants "
                         f"{shape}")  # fmt: skip
    matrices = iter(jnp.asarray(found[MATRICES], jnp.float32))
    return with_states(
        cache, [None if s is None else replace(s, matrix=next(matrices)) for s in held]
    )


def _save(path: Path, arrays: Mapping[str, np.ndarray], about: dict[str, str]) -> None:
    """Under a name of its own first, so that a reader finds the whole file or none."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        save_file(dict(arrays), partial, about)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    try:
        with safe_open(path, "np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read: {str(error)[:120]}") from None
