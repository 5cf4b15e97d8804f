"""The plain placement: all entries stay on the device."""

from __future__ import annotations

from kvjax.place.base import Place


def resident() -> Place:
    """All entries of the cache stay on the device, and every query reads all of them."""
    return Place("resident")
