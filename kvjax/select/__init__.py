"""Which tokens' entries are kept: one member a file, and their registry."""

from __future__ import annotations

from collections.abc import Callable

from kvjax.select.base import Select
from kvjax.select.streaming import streaming


def all() -> Select:  # noqa: A001 - the design's name for "keep everything"
    """Keeps every token."""
    return Select()


SELECTIONS: dict[str, Callable[..., Select]] = {"all": all, "streaming": streaming}

__all__ = ["SELECTIONS", "Select", "all", "streaming"]
