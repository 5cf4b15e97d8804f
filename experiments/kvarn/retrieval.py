"""One row on retrieval: what a model answers about a fact that stands far back in its cache.

A prompt goes through the cache in blocks, so later blocks read what was encoded, and the answer's
tokens follow it. Greedy decoding writes the answer exactly if each of its tokens is the likeliest
after the ones before it, so one pass tells both the greedy answer and its log-likelihood.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from tqdm import tqdm

import kvjax
from experiments.kvarn.drift import bits
from experiments.kvarn.rows import TASKS, transform_of
from experiments.models import open_model
from experiments.record import Metrics
from experiments.statistics import mean_interval, share_interval
from experiments.transforms import entry_dtype
from kvjax.models.decoder import step_hidden, unembed


class Asked(NamedTuple):
    """One example as tokens: the prompt, the answer that should follow, the fact's depth."""

    prompt: list[int]
    target: list[int]
    depth: float


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Accuracy and log-likelihood of a task's answers, and every example's own."""
    model, tokenizer = open_model(config.model, config.dtype)
    asked = examples(tokenizer, config)
    with Metrics(folder) as metrics:
        found = answer(model, config, asked, metrics)
    return {
        "scale": scale(model, config, asked),
        **summary(found, asked),
        "bits": bits(model, config),
        "examples": found,
    }


def examples(tokenizer: Any, config: ConfigDict) -> list[Asked]:
    """`config.prompts` examples of the task; a task that has depths has as many at each."""
    arguments = dict(config.task)
    task = TASKS[arguments.pop("name")](**arguments)
    found = task.examples(
        tokenizer, -(-config.prompts // len(getattr(task, "depths", (0,)))), config.seed
    )
    return [
        Asked(tokenizer.encode(e.prompt), tokenizer.encode(e.target), e.info["depth"])
        for e in found
    ]


def answer(
    model: Any, config: ConfigDict, asked: list[Asked], metrics: Metrics
) -> dict[str, list[float]]:
    """For every example: `right`, 1 where the greedy answer is the target, and the target's `nll`
    in nats, all its tokens together."""
    batch, block = config.batch, config.block
    longest = max(len(item.prompt) + len(item.target) for item in asked)
    width = -(-longest // block) * block
    found: dict[str, list[float]] = {"right": [], "nll": []}
    for at in tqdm(range(0, len(asked), batch), unit="batch", leave=False, disable=None):
        part = asked[at : at + batch]
        full = part + part[:1] * (batch - len(part))  # one shape, one program
        right, nll = _answers(model, config, full, width)
        found["right"] += right[: len(part)]
        found["nll"] += nll[: len(part)]
        metrics.write(at + len(part), {name: float(np.mean(x)) for name, x in found.items()})
    return found


def _answers(
    model: Any, config: ConfigDict, asked: list[Asked], width: int
) -> tuple[list[float], list[float]]:
    lengths = np.asarray([len(item.prompt) + len(item.target) for item in asked])
    tokens = np.zeros((len(asked), width), np.int32)
    for row, item in enumerate(asked):
        tokens[row, : lengths[row]] = item.prompt + item.target
    hidden = run(model, config, tokens, np.arange(width) < lengths[:, None])
    right, nll = [], []
    for row, item in enumerate(asked):
        count = len(item.target)
        places = slice(lengths[row] - count - 1, lengths[row] - 1)
        log_p = jax.nn.log_softmax(unembed(model, jnp.asarray(hidden[row : row + 1, places])))[0]
        target = np.asarray(item.target)
        right.append(float((np.asarray(log_p).argmax(-1) == target).all()))
        nll.append(-float(np.asarray(log_p)[np.arange(count), target].sum()))
    return right, nll


def run(model: Any, config: ConfigDict, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Hidden states [B, T, E] of left-aligned rows that went through the cache block by block."""
    block, batch, dtype = config.block, len(tokens), entry_dtype(config.cache)
    cache = kvjax.init_cache(model, transform_of(config), batch, tokens.shape[1], dtype=dtype)
    parts = []
    for at in range(0, tokens.shape[1], block):
        piece, real = (jnp.asarray(x[:, at : at + block]) for x in (tokens, mask))
        hidden, cache = step_hidden(model, piece, cache, real, donate=True)
        cache = kvjax.finish(model, cache)
        parts.append(np.asarray(hidden))
    return np.concatenate(parts, axis=1)


def scale(model: Any, config: ConfigDict, asked: list[Asked]) -> dict[str, Any]:
    """What the numbers are about."""
    ids = [item.prompt + item.target for item in asked]
    return {
        "task": config.task.name,
        "n": len(asked),
        "prompt_tokens": float(np.mean([len(item.prompt) for item in asked])),
        "model": config.model,
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "dtype": config.dtype,
        "block": config.block,
        "tokens_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
    }


def summary(found: dict[str, list[float]], asked: list[Asked]) -> dict[str, Any]:
    """Accuracy with Wilson's interval, the answer's negative log-likelihood, and by depth."""
    right, depth = np.asarray(found["right"]), np.asarray([item.depth for item in asked])
    fifth = np.minimum((5 * depth).astype(int), 4)
    return {
        "accuracy": share_interval(int(right.sum()), right.size)._asdict(),
        "nll": mean_interval(np.asarray(found["nll"])[:, None])._asdict(),
        "by_depth": [
            {"depth": float(depth[fifth == i].mean()), "n": int((fifth == i).sum()),
             "accuracy": float(right[fifth == i].mean())}
            for i in range(5) if (fifth == i).any()
        ],
    }  # fmt: skip
