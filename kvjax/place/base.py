"""Where a cache's entries live: the protocol every placement follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Everything on the device.

    Attributes:
      name: the registry name of the placement.
    """

    name: str = "resident"
