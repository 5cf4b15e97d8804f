"""What a config file's `get_config(arg)` does with its argument, and how overrides are checked."""

import copy
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict


def config_module(flag: str) -> tuple[ModuleType, str]:
    """The config file's module and the argument, of a flag such as `configs/x.py:smoke`."""
    path, _, arg = flag.partition(".py:")
    path = path if path.endswith(".py") else path + ".py"
    spec = importlib.util.spec_from_file_location("kvjax_config", path)
    if spec is None or spec.loader is None or not Path(path).exists():
        raise ValueError(f"--config={flag}: there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, arg


def parse_arg(arg: str | None, **defaults: bool | int | float | str) -> ConfigDict:
    """Parses `"smoke"` or `"full,length=4096"` by the types of `defaults`.

    A bare word switches a boolean on. Anything unknown or of another type is a `ValueError`.
    """
    parsed = ConfigDict(defaults)
    for part in filter(None, (arg or "").split(",")):
        key, equals, word = part.partition("=")
        if key not in defaults:
            raise ValueError(f"config argument {key!r}: unknown; it takes {', '.join(defaults)}")
        parsed[key] = _typed(key, word if equals else "true", type(defaults[key]))
    return parsed


def _typed(key: str, word: str, kind: type) -> bool | int | float | str:
    if kind is bool:
        if word.lower() not in ("true", "false"):
            raise ValueError(f"config argument {key}={word}: write {key}, or {key}=false")
        return word.lower() == "true"
    try:
        return kind(word)
    except ValueError as error:
        raise ValueError(f"config argument {key}={word}: not {_name(kind)}") from error


def with_overrides(config: ConfigDict, overrides: Mapping[str, Any]) -> ConfigDict:
    """A copy of `config` with `{"cache.encode.key_bits": 4}` applied.

    Unknown paths and other types are a `ValueError` that names the path and what is there.
    """
    changed = copy.deepcopy(config)  # keeps placeholders, and with them the types they ask for
    for path, value in overrides.items():
        node_at(changed, path)
        parent, _, key = path.rpartition(".")
        node = node_at(changed, parent) if parent else changed
        try:
            node[key] = value
        except (TypeError, ValueError) as error:
            raise ValueError(f"config.{path}={value!r}: {error}") from error
    return changed


def node_at(config: ConfigDict, path: str) -> Any:
    """What a dotted path names; `ValueError` says where it leaves the config and what is there."""
    node: Any = config
    parts = path.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, ConfigDict) or part not in node:
            at = ".".join(["config", *parts[:depth]])
            there = ", ".join(sorted(node)) if isinstance(node, ConfigDict) else "no fields"
            raise ValueError(f"config.{path}: unknown; {at} has {there}")
        node = node[part]
    return node


def check_types(config: ConfigDict, template: ConfigDict, path: str = "config") -> None:
    """Holds `config` to the keys and types of `template`, tuple elements included.

    `ConfigDict` itself checks neither an element of a tuple nor a config built by hand. An empty
    tuple, `None` and an empty `ConfigDict` in the template say nothing about what is inside.
    """
    for key in config:
        if key not in template:
            raise ValueError(f"{path}.{key}: unknown; {path} has {', '.join(sorted(template))}")
    for key in template:
        if key not in config:
            raise ValueError(f"{path}.{key}: missing; the config file sets it")
        _check_value(config[key], template[key], f"{path}.{key}")


def _check_value(value: Any, model: Any, path: str) -> None:
    if isinstance(model, ConfigDict):
        if not isinstance(value, ConfigDict):
            raise ValueError(f"{path}: expected a group of fields, got {value!r}")
        if len(model):
            check_types(value, model, path)
    elif isinstance(model, tuple):
        if not isinstance(value, tuple):
            raise ValueError(f"{path}: expected a tuple, got {value!r}")
        for index, element in enumerate(value if model else ()):
            _check_value(element, model[0], f"{path}[{index}]")
    elif model is not None and value is not None and not _fits(value, type(model)):
        raise ValueError(
            f"{path}: expected {_name(type(model))}, got {_name(type(value))} {value!r}"
        )


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _name(kind: type) -> str:
    return {int: "an int", float: "a float", bool: "a bool", str: "a str"}.get(kind, kind.__name__)
