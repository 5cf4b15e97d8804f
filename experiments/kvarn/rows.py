"""From a config to its points, and everything about a config that can be wrong beforehand."""

from typing import Any

from ml_collections import ConfigDict

import kvjax
from experiments.head_to_head.rows import check_dtype, check_rows, check_texts
from experiments.kvarn.patched import WHICH, Patched
from experiments.points import Point
from experiments.transforms import build, resolve
from kvjax.data.retrieval import Lines, Needles, Passkey

PARTS = ("drift", "paired", "retrieval", "paper")
REGIMES = ("decode", "static")
TASKS: dict[str, Any] = {task.name: task for task in (Lines, Passkey, Needles)}
TEXT_FIELDS = ("experiment", "part", "model", "dtype", "texts", "length", "block")


def validate(config: ConfigDict) -> None:
    """`ValueError` naming field and remedy, before a model is read or anything compiled."""
    if config.part not in PARTS:
        raise ValueError(f"config.part={config.part!r}: choose one of {', '.join(PARTS)}")
    check_dtype(config)
    check_rows(config, ("rows", "drift_rows", "paired_rows", "retrieval_rows"))
    if config.part == "retrieval":
        return _check_retrieval(config)
    check_texts(config, ("length", "block"))
    if config.part == "paired":
        _check_paired(config)


def _check_paired(config: ConfigDict) -> None:
    for regime in config.regimes:
        if regime not in REGIMES:
            raise ValueError(f"config.regimes: {regime!r}; choose among {', '.join(REGIMES)}")
    if config.block != config.cache.tile or config.cache.sink % config.block:
        raise ValueError(
            f"config.block={config.block}: a block must be one tile (config.cache.tile="
            f"{config.cache.tile}) and config.cache.sink={config.cache.sink} whole blocks, so "
            "that each block's keys are found again in the tile it became"
        )


def _check_retrieval(config: ConfigDict) -> None:
    for field in ("prompts", "batch"):
        if config.retrieval[field] < 1:
            raise ValueError(f"config.retrieval.{field}={config.retrieval[field]}: use 1 or more")
    for name, arguments in config.tasks.items():
        if name not in TASKS:
            raise ValueError(f"config.tasks.{name}: unknown; choose among {', '.join(TASKS)}")
        try:
            TASKS[name](**arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f"config.tasks.{name}: {error}") from error


def points(config: ConfigDict) -> list[Point]:
    """The points of a part; `rows`, where given, chooses among the rows of any part."""
    if config.part == "drift":
        return [_drift_point(config, name) for name in config.rows or config.drift_rows]
    if config.part == "paired":
        names = config.rows or config.paired_rows
        return [_paired_point(config, name, each) for name in names for each in config.regimes]
    names = config.rows or config.retrieval_rows
    return [_retrieval_point(config, name, task) for name in names for task in config.tasks]


def _drift_point(config: ConfigDict, name: str) -> Point:
    kept = {field: config[field] for field in TEXT_FIELDS}
    return Point(name, ConfigDict(kept | _row(config, name)))


def _paired_point(config: ConfigDict, name: str, regime: str) -> Point:
    kept = {field: config[field] for field in TEXT_FIELDS} | {"regime": regime}
    return Point(f"{regime}-{name}", ConfigDict(kept | _row(config, name)))


def _retrieval_point(config: ConfigDict, name: str, task: str) -> Point:
    kept = {f: config[f] for f in ("experiment", "part", "model", "dtype", "block")}
    how = {f: config.retrieval[f] for f in ("prompts", "batch", "seed")}
    asked = {"task": {"name": task, **config.tasks[task]}}
    return Point(f"{task}-{name}", ConfigDict(kept | how | asked | _row(config, name)))


def _row(config: ConfigDict, name: str) -> dict[str, Any]:
    """`cache`, resolved, and `exact_tokens` where the row has them; impossible values end here."""
    row = dict(config.grid[name].items())
    patch = row.pop("exact_tokens", None)
    base = {field: config.cache[field] for field in ("sink", "tile", "dtype")}
    cache = resolve(ConfigDict(base | row), f"config.grid.{name}")
    found = {"cache": cache} | ({} if patch is None else {"exact_tokens": patch})
    transform_of(ConfigDict(found))
    return found


def encoder_of(config: ConfigDict) -> Any:
    """The encoder of a point's config; None for a row without."""
    arguments = dict(config.cache.encode)
    return kvjax.encode.from_config(arguments.pop("name"), **arguments)


def transform_of(config: ConfigDict) -> Any:
    """The cache transform of a point's config."""
    transform = build(config.cache)
    if "exact_tokens" not in config:
        return transform
    which, share = config.exact_tokens.which, config.exact_tokens.share
    if which not in WHICH:
        raise ValueError(f"exact_tokens.which={which!r}: choose one of {', '.join(WHICH)}")
    inner = encoder_of(config)
    if inner is None:
        raise ValueError("exact_tokens: the row has no encoder, so all its tokens are exact")
    return kvjax.cache(encode=Patched(inner.tile, inner, share, which), sink=config.cache.sink)
