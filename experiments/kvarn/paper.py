"""The KVarN paper's own setting: its models, benchmarks, sampling, repeats and caches.

`configs/kvarn.py:paper` is `paper_config()`. Models are local Hugging Face folders and benchmarks
local files; `--dry_run` resolves every point and lists what is not there. What the paper does not
say is ours: Llama's sampling, the same sinks for every method, the number of prompts and the length
of answers in line retrieval, and chat templates at their defaults (Qwen3 thinks before it answers).
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments.points import Point
from experiments.transforms import build, label, resolve
from kvjax.data import BENCHMARKS
from kvjax.models.generate import Sampling

_LINES = tuple(f"lines_{count}" for count in range(100, 601, 100))
_ALL = ("aime24", "math500", "humaneval", "ifeval", *_LINES)
_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_4b": {
        "folder": "Qwen/Qwen3-4B", "temperature": 0.6, "top_p": 0.95, "top_k": 20,
        "benchmarks": _ALL,
    },
    "phi4": {
        "folder": "microsoft/Phi-4-reasoning-plus", "temperature": 0.8, "top_p": 0.95, "top_k": 50,
        "benchmarks": _ALL,
    },
    # The paper names no sampling for this model, and has it on these alone.
    "llama31_8b": {
        "folder": "meta-llama/Llama-3.1-8B-Instruct", "temperature": 0.0, "top_p": 1.0, "top_k": 0,
        "benchmarks": ("ifeval", *_LINES),
    },
}  # fmt: skip
_BENCHMARKS: dict[str, dict[str, Any]] = {
    "aime24": {"max_new": 16384, "sink": 128, "lines": 0},
    "math500": {"max_new": 8192, "sink": 128, "lines": 0},
    "humaneval": {"max_new": 16384, "sink": 128, "lines": 0},
    "ifeval": {"max_new": 1280, "sink": 32, "lines": 0},
}
for _name in _LINES:
    _BENCHMARKS[_name] = {"max_new": 2048, "sink": 128, "lines": int(_name[6:])}
_TWO = {"key_bits": 2, "value_bits": 2}
_METHODS: dict[str, dict[str, Any]] = {
    "fp16": {"encode": {"name": "none"}},
    "kivi": {"encode": {"name": "kivi", **_TWO, "group": 128}},  # 2.25 bits, as the paper counts
    "quarot": {"encode": {"name": "hadamard_rtn", **_TWO, "key_axis": "channel"}},
    "turboquant": {
        "encode": {"name": "turboquant_nc", "key_bits": 3, "value_bits": 3},
        "exact_ends": 2,  # as vLLM ships it; so its 3.25 bits come to 4.6 over all layers
    },
    "kitty": {"encode": {"name": "kitty", **_TWO}},
    "kvarn": {"encode": {"name": "kvarn", **_TWO, "scale_bits": 8}},
    "heed": {"encode": {"name": "heed", **_TWO}},
}


def paper_config() -> ConfigDict:
    """What the paper's tables of generation, IFEval and line retrieval need."""
    config = ConfigDict()
    config.experiment = "kvarn"
    config.part = "paper"
    config.models_folder = "models"  # holds <folder> of each model
    config.data_folder = "benchmarks"  # holds the benchmarks' public files
    config.dtype = "bfloat16"
    config.tile = 128
    config.models = ConfigDict(_MODELS)
    config.benchmarks = ConfigDict(_BENCHMARKS)  # `lines`: line retrieval, made here, if not 0
    config.line_prompts = 100
    # `exact_ends`: so many layers at either end stay exact.
    config.methods = ConfigDict({name: {"exact_ends": 0} | m for name, m in _METHODS.items()})
    config.only = ConfigDict({"models": (), "benchmarks": (), "methods": ()})  # empty: all
    config.seeds = (0, 1, 2)  # one a repeat
    config.batch = 8  # prompts that are generated together
    config.limit = 0  # the first so many prompts; 0: all
    return config


def validate(config: ConfigDict) -> None:
    """`ValueError` naming field and remedy, before a file is read or anything compiled."""
    for field, least in (("batch", 1), ("limit", 0), ("tile", 1), ("line_prompts", 1)):
        if config[field] < least:
            raise ValueError(f"config.{field}={config[field]}: use {least} or more")
    if not config.seeds or len(set(config.seeds)) < len(config.seeds) or min(config.seeds) < 0:
        raise ValueError(f"config.seeds={config.seeds}: name distinct seeds of 0 or more")
    if config.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"config.dtype={config.dtype!r}: use 'float32' or 'bfloat16'")
    for name, test in config.benchmarks.items():
        if not test.lines and name not in BENCHMARKS:
            there = ", ".join(BENCHMARKS)
            raise ValueError(f"config.benchmarks.{name}: unknown; use {there}, or set its lines")
        if test.max_new < 1:
            raise ValueError(f"config.benchmarks.{name}.max_new={test.max_new}: use 1 or more")
    for name in config.models:
        _validate_model(config, name)
    for choice in config.only:
        for name in config.only[choice]:
            if name not in config[choice]:
                there = ", ".join(config[choice])
                raise ValueError(f"config.only.{choice}: no {name!r}; choose {there}")


def _validate_model(config: ConfigDict, name: str) -> None:
    model = config.models[name]
    try:
        sampling(model)
    except ValueError as error:
        raise ValueError(f"config.models.{name}: {error}") from None
    for benchmark in model.benchmarks:
        if benchmark not in config.benchmarks:
            there = ", ".join(config.benchmarks)
            raise ValueError(f"config.models.{name}.benchmarks: no {benchmark!r}; choose {there}")


def sampling(model: ConfigDict) -> Sampling:
    """How a model's tokens are drawn."""
    return Sampling(model.temperature, model.top_k, model.top_p)


def points(config: ConfigDict, _: Collection[str] = ()) -> list[Point]:
    """One point a model, benchmark and method; its repeats are inside it."""

    def chosen(choice: str) -> list[str]:
        return [name for name in config[choice] if name in (config.only[choice] or config[choice])]

    found = [
        _point(config, model, benchmark, method)
        for model in chosen("models")
        for benchmark in chosen("benchmarks")
        for method in chosen("methods")
        if benchmark in config.models[model].benchmarks
    ]
    if not found:
        raise ValueError("config.only: nothing is left; no chosen model has a chosen benchmark")
    return found


def _point(config: ConfigDict, model: str, benchmark: str, method: str) -> Point:
    own, test = config.methods[method], config.benchmarks[benchmark]
    base = {"sink": test.sink, "tile": config.tile}
    cache = resolve(ConfigDict(base | {"encode": own.encode}), f"config.methods.{method}")
    build(cache)  # members reject impossible values here
    who = {key: config.models[model][key] for key in ("folder", "temperature", "top_p", "top_k")}
    kept = ("experiment", "part", "models_folder", "data_folder", "dtype", "batch", "limit",
            "line_prompts")  # fmt: skip
    parts = {
        "seeds": config.seeds, "model": who, "method": method, "cache": cache,
        "benchmark": {"name": benchmark, "max_new": test.max_new, "lines": test.lines},
        "exact_ends": own.exact_ends,
    }  # fmt: skip
    name = f"{model},{benchmark},{method}"
    return Point(name, ConfigDict({key: config[key] for key in kept} | parts))


def missing_files(chosen: Sequence[Point]) -> list[str]:
    """Local files that these points read and that are not there, each once."""
    missing: dict[str, None] = {}
    for point in chosen:
        folder = Path(point.config.models_folder) / point.config.model.folder
        absent = [str(path) for path in model_files(folder) if not path.is_file()]
        if not point.config.benchmark.lines:
            benchmark = BENCHMARKS[point.config.benchmark.name]
            absent += benchmark.missing(point.config.data_folder)
        missing |= dict.fromkeys(absent)
    return list(missing)


def model_files(folder: Path) -> list[Path]:
    """What a Hugging Face folder must hold; its shards where an index names them."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    return [folder / name for name in ("config.json", "tokenizer.json", *names)]


def dry_run(_: ConfigDict, chosen: Sequence[Point]) -> list[str]:
    """Every point as it would run, then the files and packages that are still missing."""
    lines = [f"{point.name}: {_summary(point.config)}" for point in chosen]
    lines.append(f"{len(chosen)} points")
    lines += [f"missing file: {path}" for path in missing_files(chosen)]
    for name in dict.fromkeys(point.config.benchmark.name for point in chosen):
        unmet = BENCHMARKS[name].unmet() if name in BENCHMARKS else []
        lines += [f"missing module for {name}: {module}" for module in unmet]
    return lines


def _summary(config: ConfigDict) -> str:
    model, limit = config.model, config.limit
    ends = f", {config.exact_ends} exact layers at either end" * bool(config.exact_ends)
    problems = f"the first {limit} prompts" if limit else "all prompts"
    return (
        f"{model.folder}, {label(config.cache)}{ends}, {config.cache.sink} sinks, {problems}, "
        f"{len(config.seeds)} repeats, at most {config.benchmark.max_new:,} new tokens, "
        f"temperature {model.temperature}, top-p {model.top_p}, top-k {model.top_k}"
    )


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Answers, scores and bytes of one point; goes on where a killed run stopped."""
    from experiments.kvarn import answering

    return answering.run_point(config, folder)
