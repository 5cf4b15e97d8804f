"""Damages small valid files at random and loads them: `python -m tests.io.fuzz COUNT [FIRST]`.

Each case must load, or be refused by a one-line ValueError, within 2 seconds and 1 GiB. Prints
one JSON object: cases, loaded, refused, the slowest case in seconds, failures. Case number i is
the same damage in every run; the number under way is kept in the file named by KVJAX_FUZZ_CASE, so
that a crash of the whole process can be traced.
"""

import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from kvjax.io.gguf import load_gguf
from kvjax.io.gguf_tokenizer import gguf_tokenizer
from kvjax.io.hf import load_folder, save_folder
from kvjax.models.config import (
    DecoderConfig,
    LayerConfig,
    RopeConfig,
    config_from_hf,
    tensor_shapes,
)
from tests.golden.hf.reference import FOLDER, NAMES
from tests.io.samples import write_gguf

SECONDS, BYTES = 2.0, 1 << 30
EXTREMES = (0, 1, 7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, 1e-320, 1e308, float("nan"),
    float("inf"), "", "x" * 999, "../../x", "F32", "linear", "yarn", [], {}, [[]], [0] * 99,
    {"a": {}}, ["full_attention"],
)  # fmt: skip


class Hang(BaseException):
    """Raised by the alarm; no `except Exception` on the way swallows it."""


def tiny(family: str, **changes: Any) -> DecoderConfig:
    values = {
        "family": family, "vocab_size": 280, "hidden_size": 8, "intermediate_size": 8,
        "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "layers": (LayerConfig(),),
        "context": 64, "bos_id": 1, "eos_ids": (2,), "pad_id": 0,
    }  # fmt: skip
    return DecoderConfig(**(values | changes))


GEMMA = {
    "layers": (LayerConfig(4, RopeConfig()), LayerConfig(None, RopeConfig(1e6))),
    "norm_offset": 1.0, "sandwich_norms": True, "qk_norm": True, "activation": "gelu_tanh",
    "embed_scale": 8**0.5,
}  # fmt: skip
LLAMA3 = RopeConfig(kind="llama3", factor=8.0, original_context=64)
GPT2 = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<p>", "<s>", "</s>", "a", "b", "ab", "Ġ", "abĠ"],
    "tokenizer.ggml.merges": ["a b", "ab Ġ"], "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.ggml.token_type": np.int32([3, 3, 3, 1, 1, 1, 1, 1]),
    "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 1,
}  # fmt: skip
SPM = {
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a",
    "▁a", "aa", "<0x41>"], "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 4, 6],
}  # fmt: skip


def samples(root: Path) -> list[tuple[str, dict[str, bytes]]]:
    """(kind, file contents by name) of valid models: folders, sharded folders, GGUF files."""
    found = []
    for name in NAMES:
        small = {"vocab_size": 24, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
        data = json.loads((FOLDER / name / "config.json").read_text()) | small
        config = config_from_hf(data)
        folder = root / name
        limit = 4096 if name in ("llama", "gemma3_text") else 1 << 30  # some in shards
        words = gguf_tokenizer(Path(name), GPT2, config) if name in ("llama", "mistral") else None
        save_folder(folder, config, weights(config), words, limit)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        found.append(("folder", files | {"config.json": json.dumps(data).encode()}))
    wide = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}  # whole blocks in each row
    for i, (config, kind, keys) in enumerate((
        (tiny("llama", layers=(LayerConfig(rope=LLAMA3),)), "F32", GPT2),
        (tiny("llama", **wide), "Q8_0", SPM),
        (tiny("qwen2", qkv_bias=True, tie_embeddings=False), "F16", GPT2),
        (tiny("qwen3", qk_norm=True, **wide), "Q4_1", {}),
        (tiny("gemma3", **GEMMA), "BF16", SPM),
    )):  # fmt: skip
        path = root / f"{i}.gguf"
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in keys.items()}
        write_gguf(path, config, weights(config), kind, plain)
        found.append(("gguf", {"m.gguf": path.read_bytes()}))
    return found


def weights(config: DecoderConfig) -> dict[str, np.ndarray]:
    return {name: np.ones(shape, np.float32) for name, shape in tensor_shapes(config).items()}


# ---- damage ------------------------------------------------------------------------------------


def damage_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Flips, cuts, repeats; extremes written where a length may stand. Mostly near the start."""
    data = bytearray(raw)
    reach = len(data) if rng.random() < 0.3 else min(len(data), 4096)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(max(1, min(reach, len(data))))
        action = rng.randrange(6)
        if action == 0 and data:
            data[min(at, len(data) - 1)] = rng.randrange(256)
        elif action == 1:
            del data[at : None if rng.random() < 0.5 else at + rng.randrange(1, 64)]
        elif action == 2:
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        elif action == 3 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        else:
            form = rng.choice("IQ")
            limit = 2 ** (32 if form == "I" else 64)
            value = rng.choice((*EXTREMES, len(raw), len(raw) - at)) % limit
            data[at : at + struct.calcsize(form)] = struct.pack(f"<{form}", value)
    return bytes(data)


def damage_value(rng: random.Random, value: Any) -> Any:
    """Replaces, drops, renames or swaps something somewhere inside a JSON value."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    inner = [key for key in keys if isinstance(value[key], dict | list) and value[key]]
    if inner and rng.random() < 0.7:
        key = rng.choice(inner)
        value[key] = damage_value(rng, value[key])
        return value
    if not keys:
        return deepcopy(rng.choice(VALUES))
    one, other = rng.choice(keys), rng.choice(keys)
    action = rng.randrange(5)
    if action < 2:
        value[one] = deepcopy(rng.choice(VALUES))
    elif action == 2:
        value[one], value[other] = value[other], value[one]
    elif action == 3:
        del value[one]
    elif isinstance(value, dict):
        value[str(other) + rng.choice(("x", ".", "/", "\n"))] = value.pop(one)
    else:
        value.append(deepcopy(rng.choice(VALUES)))
    return value


def damage_json(rng: random.Random, raw: bytes) -> bytes:
    value = json.loads(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = damage_value(rng, value) if isinstance(value, dict | list) and value else value
    return json.dumps(value).encode()


def damage_header(rng: random.Random, raw: bytes) -> bytes:
    (length,) = struct.unpack("<Q", raw[:8])
    header = damage_json(rng, raw[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + raw[8 + length :]


def damage(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes]:
    name = rng.choice(sorted(files))
    ways: list[Callable[[random.Random, bytes], bytes]] = [damage_bytes]
    if name.endswith(".json"):
        ways += [damage_json] * 3
    if name.endswith(".safetensors"):
        ways += [damage_header] * 2
    return files | {name: rng.choice(ways)(rng, files[name])}


# ---- running -----------------------------------------------------------------------------------


def run_case(number: int, found: list[tuple[str, dict[str, bytes]]], root: Path) -> str:
    """What becomes of case `number`: "loaded", "refused", or what went wrong."""
    rng = random.Random(number)
    kind, files = rng.choice(found)
    return load_files(kind, damage(rng, files), root / str(number))


def load_files(kind: str, files: dict[str, bytes], folder: Path) -> str:
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        _, tensors, _ = load_gguf(folder / "m.gguf") if kind == "gguf" else load_folder(folder)
        for name in tensors:
            np.asarray(tensors[name])
        return "loaded"
    except ValueError as error:
        short = len(str(error)) < 1000 and "\n" not in str(error) and str(folder) in str(error)
        return "refused" if short else f"message {str(error)!r}"
    except (Exception, Hang) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def limit_memory() -> None:
    """No more address space than is taken now plus 1 GiB: a larger allocation fails at once."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def alarm(signum: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {SECONDS} s")


def main(count: int, first: int = 0) -> dict[str, Any]:
    signal.signal(signal.SIGALRM, alarm)
    tally: dict[str, Any] = {"cases": 0, "loaded": 0, "refused": 0, "slowest": 0.0, "failures": []}
    under_way = os.environ.get("KVJAX_FUZZ_CASE")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        found = samples(root)
        for kind, files in found:
            assert load_files(kind, files, root / "whole") == "loaded", sorted(files)
        limit_memory()
        for number in range(first, first + count):
            if under_way:
                Path(under_way).write_text(str(number))
            start = time.perf_counter()
            outcome = run_case(number, found, root)
            tally["slowest"] = max(tally["slowest"], round(time.perf_counter() - start, 3))
            tally["cases"] += 1
            if outcome in ("loaded", "refused"):
                tally[outcome] += 1
            else:
                tally["failures"].append(f"case {number}: {outcome}")
    return tally


if __name__ == "__main__":
    print(json.dumps(main(*(int(value) for value in sys.argv[1:]))))
