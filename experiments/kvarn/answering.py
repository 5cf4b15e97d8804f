"""One point of the paper's setting: generate every answer, keep it, then score all of them.

Answers go to `answers.jsonl` as they come. Prompts are generated in fixed batches, each with a seed
of its own, so a run that was killed writes the same answers as one that was not: a batch that lacks
an answer is generated again as a whole.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from tqdm import tqdm

import kvjax
from experiments.kvarn.paper import sampling
from experiments.points import plain
from experiments.record import Metrics
from experiments.statistics import mean_interval
from experiments.transforms import build
from kvjax.data import BENCHMARKS, Benchmark, Example, Task
from kvjax.data.retrieval import Lines

Answers = dict[tuple[int, int], dict[str, Any]]  # by (seed, index of the problem)


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Scores with mean, deviation over repeats and 95 % interval over problems; and the bytes."""
    if not config.benchmark.lines:
        check_scoring(BENCHMARKS[config.benchmark.name])
    model, tokenizer = open_model(config)
    task, every = task_and_examples(config, tokenizer)
    examples = every[: config.limit or None]
    prompts = [prompt_ids(tokenizer, example) for example in examples]
    room = max(map(len, prompts)) + config.benchmark.max_new
    if room > model.config.context:
        raise ValueError(
            f"config.benchmarks.{config.benchmark.name}.max_new={config.benchmark.max_new}: "
            f"with the longest prompt {room} tokens, the model's context is {model.config.context}"
        )
    answers = answer_all(config, folder, model, tokenizer, prompts)
    return {
        "scale": scale(config, model, len(examples), len(every)),
        "scores": scores(task, examples, answers, config.seeds),
        "answers": lengths(answers),
        "size": size(model, transform(config), room),
    }


def check_scoring(benchmark: Benchmark) -> None:
    """`ValueError` for packages that scoring needs, before anything is generated."""
    if unmet := ", ".join(benchmark.unmet()):
        remedy = "pip install 'kvjax[eval]'"
        raise ValueError(f"benchmark {benchmark.name!r}: scoring needs {unmet}: {remedy}")


def task_and_examples(config: ConfigDict, tokenizer: Any) -> tuple[Task, list[Example]]:
    """The judge and all its examples: from a file, or lines made for this tokenizer."""
    if lines := config.benchmark.lines:
        # As many lines as asked for: the budget is there to choose a number, and is not needed.
        task = Lines(tokens=1_000_000, lines=lines, style="chat")
        return task, task.examples(tokenizer, config.line_prompts)
    benchmark = BENCHMARKS[config.benchmark.name]
    return benchmark, benchmark.load(config.data_folder)


@lru_cache(maxsize=1)
def _load(folder: str, dtype: str) -> tuple[Any, Any]:
    return kvjax.load(folder, dtype=dtype)


def open_model(config: ConfigDict) -> tuple[Any, Any]:
    """Model and tokenizer; points of one model share them."""
    folder = Path(config.models_folder) / config.model.folder
    model, tokenizer = _load(str(folder), config.dtype)
    if tokenizer is None:
        raise ValueError(f"{folder}: no tokenizer.json, so no text goes in")
    return model, tokenizer


def prompt_ids(tokenizer: Any, example: Example) -> list[int]:
    """The prompt as one user message where there is a chat template, else as it is."""
    if tokenizer.template is None:
        return tokenizer.encode(example.prompt)
    chat = tokenizer.chat([{"role": "user", "content": example.prompt}])
    return tokenizer.encode(chat, add_special_tokens=False)


def transform(config: ConfigDict) -> kvjax.CacheTransform:
    """The cache of a point, `exact_ends` layers at either end left exact."""
    default, exact = build(config.cache), kvjax.cache()
    ends = {at: exact for n in range(config.exact_ends) for at in (n, -1 - n)}
    return kvjax.per_layer(default, ends) if ends else default


def answer_all(
    config: ConfigDict, folder: Path, model: Any, tokenizer: Any, prompts: list[list[int]]
) -> Answers:
    """Every answer of every repeat, those of an earlier run read back."""
    path = folder / "answers.jsonl"
    answers = read_answers(path, config)
    batches = [range(i, min(i + config.batch, len(prompts)))
               for i in range(0, len(prompts), config.batch)]  # fmt: skip
    todo = [(seed, batch) for seed in config.seeds for batch in batches
            if any((seed, i) not in answers for i in batch)]  # fmt: skip
    with Metrics(folder) as metrics, path.open("a", encoding="utf-8") as file:
        for seed, batch in tqdm(todo, desc=folder.name, unit="batch", leave=False, disable=None):
            rows = answer_batch(config, model, tokenizer, prompts, seed, batch)
            new = [row for row in rows if (seed, row["index"]) not in answers]
            answers |= {(seed, row["index"]): row for row in new}
            file.writelines(json.dumps(row) + "\n" for row in new)
            file.flush()
            metrics.write(len(answers), lengths(answers))
    return answers


def answer_batch(
    config: ConfigDict, model: Any, tokenizer: Any, prompts: list[list[int]], seed: int,
    batch: range,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Generates one batch together; rows as they are kept."""
    tokens, mask = padded([prompts[i] for i in batch])
    own = np.random.SeedSequence([seed, batch.start]).generate_state(1)[0] >> 1
    how = sampling(config.model)
    found = kvjax.generate(
        model, jnp.asarray(tokens), transform(config), mask=jnp.asarray(mask),
        max_new_tokens=config.benchmark.max_new, temperature=how.temperature, top_k=how.top_k,
        top_p=how.top_p, stop=tokenizer.eos_ids, seed=int(own),
    )  # fmt: skip
    for index, row in zip(batch, np.asarray(found), strict=True):
        ends = np.flatnonzero(np.isin(row, tokenizer.eos_ids))
        kept = row[: ends[0]] if ends.size else row
        yield {"seed": seed, "index": index, "tokens": len(kept), "finished": bool(ends.size),
               "text": tokenizer.decode(kept)}  # fmt: skip


def padded(prompts: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as [B,T] int32, padding on the right, and the mask of what is real."""
    width = max(map(len, prompts))
    mask = np.arange(width) < np.array([[len(p)] for p in prompts])
    tokens = np.zeros((len(prompts), width), np.int32)
    tokens[mask] = np.concatenate([np.asarray(p, np.int32) for p in prompts])
    return tokens, mask


def read_answers(path: Path, config: ConfigDict) -> Answers:
    """The answers an earlier run left; a line that a kill cut short is taken off the file.

    The first line says which config they belong to: `ValueError` for another one's.
    """
    key = hashlib.sha256(json.dumps(plain(config), sort_keys=True).encode()).hexdigest()
    if not path.exists():
        path.write_text(json.dumps({"config": key}) + "\n", "utf-8")
    lines = path.read_text("utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        scratch = path.with_suffix(".part")
        scratch.write_text("".join(whole), "utf-8")
        scratch.replace(path)
    if not whole:
        path.unlink()
        return read_answers(path, config)
    if json.loads(whole[0]) != {"config": key}:
        raise ValueError(f"{path} holds answers of another config; delete it or use another "
                         "--workdir")  # fmt: skip
    rows = [json.loads(line) for line in whole[1:]]
    return {(row["seed"], row["index"]): row for row in rows}


def scores(
    task: Task, examples: Sequence[Example], answers: Answers, seeds: Sequence[int]
) -> dict[str, dict[str, Any] | None]:
    """By metric; None for one that cannot be had here, such as the running of generated code."""
    judged = [
        [task.score(answers[seed, i]["text"], example) for seed in seeds]
        for i, example in enumerate(examples)
    ]
    found: dict[str, dict[str, Any] | None] = {}
    for metric in task.metrics:
        values = [[score[metric] for score in row] for row in judged]
        unknown = any(value is None for row in values for value in row)
        found[metric] = None if unknown else summary(np.array(values, float))
    return found


def summary(values: np.ndarray) -> dict[str, Any]:
    """Of scores [problems, repeats]: mean, its 95 % interval over problems, spread over repeats."""
    by_repeat = values.mean(axis=0)
    std = float(by_repeat.std(ddof=1)) if by_repeat.size > 1 else None
    return mean_interval(values)._asdict() | {"std": std, "by_repeat": by_repeat.tolist()}


def lengths(answers: Answers) -> dict[str, float]:
    """How long answers are, and the share that ended before the limit."""
    rows = answers.values()
    return {
        "count": len(rows),
        "mean_tokens": float(np.mean([row["tokens"] for row in rows])),
        "finished": float(np.mean([row["finished"] for row in rows])),
    }


def scale(config: ConfigDict, model: Any, problems: int, total: int) -> dict[str, Any]:
    """What the numbers are about."""
    return {
        "model": Path(config.model.folder).name,
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "dtype": config.dtype,
        "benchmark": config.benchmark.name,
        "method": config.method,
        "problems": problems,
        "total": total,
        "repeats": len(config.seeds),
        "max_new": config.benchmark.max_new,
    }


def size(model: Any, cache: kvjax.CacheTransform, tokens: int) -> dict[str, Any]:
    """Bytes of a cache for the longest prompt and its answer, and the bits per element."""
    spec = kvjax.cache_spec(model.config, model.dtype)
    total = kvjax.footprint(spec, cache, 1, tokens).total
    heads = model.config.num_kv_heads * model.config.head_dim
    elements = 2 * tokens * len(model.config.layers) * heads
    return {"tokens": tokens, "bytes": total, "bits_per_element": 8 * total / elements}
