"""The four choices for one layer, and the array shapes that follow from them.

A layer's tokens lie, in order, in `sink` (the first S, exact), `body` (whole encoded tiles of C
tokens) and `recent` (the newest, exact). Everything about where a token lies follows from how
many tokens came before it, so no positions are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.cache.spec import LayerSpec
from kvjax.encode.base import Encoder
from kvjax.place.base import Place
from kvjax.select.base import Select


@dataclass(frozen=True)
class Plan:
    """The four choices for a layer; `content` is the model's own and comes as a `LayerSpec`."""

    select: Select = Select()
    encode: Encoder | None = None
    place: Place = Place()
    sink: int = 0


@dataclass(frozen=True)
class Layout:
    """What a `Plan` makes of a `LayerSpec` at a given capacity.

    Attributes:
      sink: S, tokens held exact at the front.
      tile: C, tokens per encoded tile; 0 without an encoder.
      tiles: N, tile slots; reused in turn when a window makes old tiles unreadable.
      recent: R, exact slots for the newest tokens; reused in turn when `ring`.
      ring: whether `recent` wraps around.
      window: tokens that a query outside the sinks may see, itself included; None: all.
    """

    sink: int
    tile: int
    tiles: int
    recent: int
    ring: bool
    window: int | None


def layout(plan: Plan, spec: LayerSpec, capacity: int) -> Layout:
    """The layout of one layer for up to `capacity` tokens per row.

    A layer with a window of its own never sees its first tokens again, so it holds no sinks.
    """
    windows = [w for w in (plan.select.window, spec.window) if w is not None]
    window = min(windows) if windows else None
    sink = 0 if spec.window is not None else max(plan.sink, plan.select.sink)
    sink = min(sink, capacity)
    rest = capacity - sink
    # The chunk itself is the last token a query sees, so window − 1 earlier ones are enough.
    reach = rest if window is None else min(rest, max(window - 1, 1))
    if plan.encode is None:
        return Layout(sink, 0, 0, reach, reach < rest, window)
    tile = plan.encode.tile
    tiles = min(rest // tile, -(-reach // tile))
    return Layout(sink, tile, tiles, min(tile, rest), False, window)
