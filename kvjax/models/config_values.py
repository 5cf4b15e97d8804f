"""Reads the values of a config.json, each checked before it is believed."""

from collections.abc import Mapping
from typing import Any

MAX_SIZE = 1 << 24  # no width or vocabulary comes near; keeps an absurd config from being believed


class Values:
    """A config.json with the family's defaults, read key by key; every refusal names its key."""

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.data = {**defaults, **data}

    def get(self, key: str) -> Any:
        return self.data.get(key)

    def integer(self, key: str, default: int | None = None, high: int = MAX_SIZE) -> int:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{key}: missing from the config")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise ValueError(f"{key}: {show(value)} is not a whole number from 1 to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional_number(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{key}: missing from the config")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self.data.get(key)
        if value is None:
            return None
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not 1e-30 <= value <= 1e30:
            raise ValueError(f"{key}: {show(value)} is not a positive, finite number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{key}: {show(value)} is neither true nor false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.data.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        for v in values:
            if isinstance(v, bool) or not isinstance(v, int) or not -1 <= v < MAX_SIZE:
                raise ValueError(f"{key}: {show(v)} is not a token id")
        return tuple(v for v in values if v >= 0)

    def sequence(self, key: str, allowed: tuple[Any, ...], length: int) -> list[Any] | None:
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise ValueError(f"{key}: must be a list with one entry for each of {length} layers")
        for entry in value:
            if not isinstance(entry, str | int) or entry not in allowed:
                raise ValueError(f"{key}: {show(entry)} is none of {allowed}")
        return value

    def section(self, key: str) -> dict[str, Any]:
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{key}: {show(value)} is not an object")
        return value or {}


def show(value: Any) -> str:
    """A value short enough for a one-line message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 64:
        return "a huge integer"
    text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
