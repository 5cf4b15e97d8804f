"""Encoders: in how many bits a cached key or value is kept.

A new member is one file with an :class:`Encoder`, and one line in ``ENCODERS``.
"""

import inspect
from collections.abc import Callable
from typing import Any

from kvjax.encode.base import Encoder, Tiles
from kvjax.encode.fp8 import fp8
from kvjax.encode.hadamard_rtn import hadamard_rtn
from kvjax.encode.heed import heed
from kvjax.encode.int4 import int4
from kvjax.encode.int8 import int8
from kvjax.encode.kitty import kitty
from kvjax.encode.kivi import kivi
from kvjax.encode.kvarn import kvarn
from kvjax.encode.oscar import oscar
from kvjax.encode.rtn import rtn
from kvjax.encode.turboquant import turboquant
from kvjax.encode.turboquant_nc import turboquant_nc


def none() -> None:
    """No encoding: the cache keeps the numbers as they are."""
    return None


ENCODERS: dict[str, Callable[..., Encoder | None]] = {
    "none": none,
    "int8": int8,
    "fp8": fp8,
    "int4": int4,
    "rtn": rtn,
    "hadamard_rtn": hadamard_rtn,
    "kivi": kivi,
    "kitty": kitty,
    "turboquant": turboquant,
    "turboquant_nc": turboquant_nc,
    "heed": heed,
    "oscar": oscar,
    "kvarn": kvarn,
}


def from_config(name: str, **kwargs: Any) -> Encoder | None:
    """The encoder called ``name`` with its arguments by name.

    Raises:
      ValueError: for an unknown name or argument, naming those that exist.
    """
    if name not in ENCODERS:
        raise ValueError(f"encode.name={name!r} is unknown: choose one of {sorted(ENCODERS)}")
    known = inspect.signature(ENCODERS[name]).parameters
    unknown = sorted(set(kwargs) - set(known))
    if unknown:
        raise ValueError(f"encode.{unknown[0]} is no argument of {name}: it takes {list(known)}")
    return ENCODERS[name](**kwargs)


__all__ = [
    "ENCODERS",
    "Encoder",
    "Tiles",
    "fp8",
    "from_config",
    "hadamard_rtn",
    "heed",
    "int4",
    "int8",
    "kitty",
    "kivi",
    "kvarn",
    "none",
    "oscar",
    "rtn",
    "turboquant",
    "turboquant_nc",
]
