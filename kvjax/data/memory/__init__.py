"""Memory benchmarks by name: `BENCHMARKS["facts"]().episodes(count=10, seed=0)`.

All are made from a seed, offline.
"""

from kvjax.data.memory.episode import Episode, MemoryBenchmark, Question

BENCHMARKS: dict[str, type[MemoryBenchmark]] = {}

__all__ = ["BENCHMARKS", "Episode", "MemoryBenchmark", "Question"]
