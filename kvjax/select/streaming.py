"""StreamingLLM: attention sinks and a window of recent tokens."""

from __future__ import annotations

from kvjax.select.base import Select

POSITIONS = ("original", "rerotated")


def streaming(sink: int = 4, recent: int = 1024, positions: str = "original") -> Select:
    """The first `sink` tokens and the newest `recent`, the token itself included.

    Args:
      sink: first tokens that are never dropped.
      recent: newest tokens that a query sees, itself included.
      positions: `"original"` keeps every token's own position; `"rerotated"` counts positions
        inside the cache, so that no distance ever exceeds sink + recent.

    Raises:
      ValueError: for a negative sink, a recent below 1 or unknown positions.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
    arXiv 2309.17453, section 3.2. Its released code re-rotates.
    """
    if sink < 0:
        raise ValueError(f"select.sink is {sink}; use 0 or more")
    if recent < 1:
        raise ValueError(f"select.recent is {recent}; use 1 or more (the token itself counts)")
    if positions not in POSITIONS:
        raise ValueError(f"select.positions is {positions!r}; use one of {POSITIONS}")
    return Select(sink=sink, window=recent, rerotate=positions == "rerotated")
