"""`config.cache` as a cache transform: each choice is a member's name and its arguments.

    cache = {select: {name, ...}, encode: {name, ...}, place: {name}, sink, tile, dtype}

An argument left at `None` takes the member's own default; an argument that the member does not
have is an error. So a new member needs no line here.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from ml_collections import ConfigDict

import kvjax
from kvjax.encode import ENCODERS
from kvjax.place import PLACEMENTS
from kvjax.select import SELECTIONS

CHOICES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "select": SELECTIONS,
    "encode": ENCODERS,
    "place": PLACEMENTS,
}
DTYPES = ("model", "float32", "bfloat16", "float16")  # of exact entries; the model's own first
NOTHING = {"select": "all", "encode": "none", "place": "resident"}


def resolve(cache: ConfigDict, path: str = "config.cache") -> ConfigDict:
    """The same choices with every argument spelled out; `ValueError` names field and remedy.

    `tile` goes to the member that takes one, so a cache without an encoder does not depend on it.
    """
    for key in cache:
        if key not in (*CHOICES, "sink", "tile", "dtype"):
            fields = ", ".join([*CHOICES, "sink", "tile", "dtype"])
            raise ValueError(f"{path}.{key}: unknown; a cache is made of {fields}")
    sink, tile = cache.get("sink", 0), cache.get("tile", 128)
    _check_int(sink, f"{path}.sink", least=0)
    _check_int(tile, f"{path}.tile", least=1)
    dtype = cache.get("dtype", DTYPES[0])
    if dtype not in DTYPES:
        raise ValueError(f"{path}.dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    resolved = {
        choice: _resolve_member(cache.get(choice), choice, tile, path) for choice in CHOICES
    }
    return ConfigDict({"sink": sink, "dtype": dtype, **resolved})


def entry_dtype(cache: ConfigDict) -> str | None:
    """The dtype of a resolved cache's exact entries; None: the model's own."""
    return None if cache.dtype == DTYPES[0] else cache.dtype


def _check_int(value: Any, path: str, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{path}={value!r}: expected an int of {least} or more")


def _resolve_member(given: ConfigDict | None, choice: str, tile: int, path: str) -> ConfigDict:
    path = f"{path}.{choice}"
    arguments = dict(given or {"name": NOTHING[choice]})
    name = arguments.pop("name", None)
    if name not in CHOICES[choice]:
        known = ", ".join(CHOICES[choice])
        raise ValueError(f"{path}.name={name!r}: unknown; choose one of {known}")
    member = CHOICES[choice][name]
    kinds, parameters = get_type_hints(member), inspect.signature(member).parameters
    arguments = {key: value for key, value in arguments.items() if value is not None}
    for key, value in arguments.items():
        if key not in parameters:
            takes = ", ".join(parameters) or "nothing"
            raise ValueError(f"{path}.{key}={value!r}: {name} takes {takes}; leave {key} out")
        if not isinstance(value, kinds[key]) or isinstance(value, bool) != (kinds[key] is bool):
            raise ValueError(f"{path}.{key}={value!r}: {name} wants {kinds[key].__name__} here")
    inherited = {"tile": tile} if "tile" in parameters else {}
    defaults = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
    return ConfigDict({"name": name, **defaults, **inherited, **arguments})


def build(cache: ConfigDict) -> Any:
    """The transform of a resolved `config.cache`; members check their own values."""
    members = {}
    for choice, registry in CHOICES.items():
        arguments = dict(cache[choice])
        name = arguments.pop("name")
        try:
            members[choice] = registry[name](**arguments)
        except ValueError as error:
            raise ValueError(f"config.cache.{choice} ({name}): {error}") from error
    return kvjax.cache(**members, sink=cache.sink)


def label(cache: ConfigDict) -> str:
    """A short name for a resolved cache, such as `streaming-512+kvarn-k2v2`; `exact` for none."""
    parts = []
    select, encode, place = cache.select, cache.encode, cache.place
    if select.name != "all":
        parts.append(f"{select.name}" + (f"-{select.recent}" if "recent" in select else ""))
    if encode.name != "none":
        bits = f"-k{encode.key_bits}v{encode.value_bits}" if "key_bits" in encode else ""
        parts.append(encode.name + bits)
    if place.name != "resident":
        parts.append(place.name)
    name = "+".join(parts) or "exact"
    return name if cache.dtype == DTYPES[0] else f"{name}-{cache.dtype}"
