"""From a config to its points, and everything about a config that can be wrong beforehand."""

from collections.abc import Collection
from typing import Any

from ml_collections import ConfigDict

from experiments.args import node_at
from experiments.compressor import check_compressor
from experiments.points import Point
from experiments.transforms import build, label, resolve

# Set by hand, these show in the label; other fields are added to the point's name.
_IN_LABEL = {
    *("cache.select.name", "cache.select.recent", "cache.place.name"),
    *("cache.encode.name", "cache.encode.key_bits", "cache.encode.value_bits"),
}


def validate(config: ConfigDict) -> None:
    """`ValueError` naming field and remedy, before a model is read or anything compiled."""
    check_texts(config, ("length", "block", "decode_tokens"))
    check_dtype(config)
    check_rows(config, ("rows",))


def check_texts(config: ConfigDict, counts: Collection[str]) -> None:
    """Texts, and the fields that count tokens of them."""
    for field in counts:
        if config[field] < 1:
            raise ValueError(f"config.{field}={config[field]}: use 1 or more")
    if config.length % (4 * config.block):
        raise ValueError(
            f"config.length={config.length}: use a multiple of 4 blocks ({4 * config.block}), so "
            "that each quarter is whole blocks"
        )
    if not config.texts:
        raise ValueError("config.texts=(): name at least one text, such as 'wikipedia/Albedo'")
    if len(set(config.texts)) < len(config.texts):
        raise ValueError("config.texts: a text stands twice; name each once")


def check_dtype(config: ConfigDict) -> None:
    if config.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"config.dtype={config.dtype!r}: use 'float32' or 'bfloat16'")


def check_rows(config: ConfigDict, fields: Collection[str]) -> None:
    """Fields that name rows of the grid."""
    for field in fields:
        for row in config[field]:
            if row not in config.grid:
                raise ValueError(
                    f"config.{field}: no {row!r} in the grid; choose {', '.join(config.grid)}"
                )


def points(config: ConfigDict, overridden: Collection[str] = ()) -> list[Point]:
    """The rows of the grid, or the one transform of `config.cache` when a choice was set by hand.

    `cache.sink`, `cache.tile` and `cache.dtype` alone set by hand hold for every row.
    """
    by_hand = [path for path in overridden if path.startswith("cache.")]
    if any(path.count(".") > 1 for path in by_hand):
        cache = resolve(config.cache)
        rest = sorted(path for path in by_hand if path not in _IN_LABEL)
        changes = [f"{path.removeprefix('cache.')}={node_at(config, path)}" for path in rest]
        return [_point(config, ",".join([label(cache), *changes]), cache, {})]
    chosen = config.rows or tuple(config.grid)
    return [_row(config, name) for name in chosen]


def _row(config: ConfigDict, name: str) -> Point:
    row, soft = dict(config.grid[name].items()), {}
    if "soft" in row:
        soft = {"soft": row.pop("soft"), "compressor": config.compressor}
        check_compressor(config.compressor, {f"config.grid.{name}.soft": soft["soft"]})
    base = {field: config.cache[field] for field in ("sink", "tile", "dtype")}
    return _point(config, name, resolve(ConfigDict(base | row), f"config.grid.{name}"), soft)


def _point(config: ConfigDict, name: str, cache: ConfigDict, soft: dict[str, Any]) -> Point:
    """A point's config holds what defines it and no more, so that other rows do not touch it."""
    build(cache)  # members reject impossible values here
    kept = ("experiment", "model", "dtype", "texts", "length", "block", "decode_tokens")
    own = {key: config[key] for key in kept} | {"cache": cache} | soft
    return Point(name, ConfigDict(own))
