"""Which tokens' entries a cache keeps: the protocol every selection follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Select:
    """Keeps everything. A selection overrides the attributes, `finish`, or both.

    Attributes:
      sink: how many first tokens are always kept, exact.
      window: how many newest tokens a query may see, itself included; None: all.
      rerotate: whether the kept tokens take consecutive positions (StreamingLLM's rule).
    """

    sink: int = 0
    window: int | None = None
    rerotate: bool = False

    def finish(self, cache: Any, probe: Callable) -> Any:
        """Whole-model work after prefill; returns the cache, possibly of other shapes."""
        del probe
        return cache
