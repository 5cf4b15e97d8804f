"""What Hugging Face transformers computes for the small models in the folders beside this file."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

FOLDER = Path(__file__).parent
NAMES = ("llama", "llama_rope_llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text",
         "smollm3")  # fmt: skip


def expected(name: str) -> dict[str, np.ndarray]:
    """The expected tensors of one folder, those included that follow exactly from others.

    Stored whole for `llama` only. For the rest, padded logits are the rows of `logits_full` moved
    to where the mask is 1 (bit-equal to what was recorded) and logits of cached decoding are
    `logits_full` itself (within 2.3e-5 of what was recorded).
    """
    tensors = load_file(FOLDER / name / "expected.safetensors")
    tensors.setdefault("logits_decode", tensors["logits_full"])
    for side in ("leftpad", "rightpad"):
        tensors.setdefault(f"{side}.logits_full", _moved(tensors, side))
    tensors.setdefault("leftpad.logits_decode", tensors["leftpad.logits_full"])
    return tensors


def _moved(tensors: dict[str, np.ndarray], side: str) -> np.ndarray:
    moved = np.zeros_like(tensors["logits_full"])  # [B,T,V]
    for row, mask in enumerate(tensors[f"{side}.attention_mask"]):
        at = np.flatnonzero(mask)
        moved[row, at] = tensors["logits_full"][row, : len(at)]
    return moved
