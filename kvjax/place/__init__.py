"""Where entries live and which are on the device: one member a file, and their registry."""

from __future__ import annotations

from collections.abc import Callable

from kvjax.place.base import Place
from kvjax.place.resident import resident

PLACEMENTS: dict[str, Callable[..., Place]] = {"resident": resident}

__all__ = ["PLACEMENTS", "Place", "resident"]
