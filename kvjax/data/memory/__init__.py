"""Memory benchmarks by name: `BENCHMARKS["facts"]().episodes(count=10, seed=0)`.

Those of `BENCHMARKS` are made from a seed, offline. `OFFICIAL` reads a person's own copies of the
public files: `OFFICIAL["locomo"]("locomo10.json").episodes(10)`. `MQAR` is arrays of ids.
"""

from typing import Any

from kvjax.data.memory.episode import Episode, MemoryBenchmark, Question
from kvjax.data.memory.facts import Facts
from kvjax.data.memory.finding import Finding
from kvjax.data.memory.learning import Learning
from kvjax.data.memory.mqar import MQAR, Recall
from kvjax.data.memory.official import Locomo, LongMemEval, MemoryAgentBench
from kvjax.data.memory.scoring import stale
from kvjax.data.memory.sessions import LongMemEvalLike
from kvjax.data.memory.timelines import LocomoLike

# Each value is a dataclass that follows `MemoryBenchmark`, its settings the fields.
BENCHMARKS: dict[str, type[Any]] = {
    benchmark.name: benchmark
    for benchmark in (Facts, Learning, Finding, LocomoLike, LongMemEvalLike)
}
OFFICIAL: dict[str, type[Any]] = {
    benchmark.name: benchmark for benchmark in (MemoryAgentBench, Locomo, LongMemEval)
}

__all__ = [
    "BENCHMARKS",
    "MQAR",
    "OFFICIAL",
    "Episode",
    "Facts",
    "Finding",
    "Learning",
    "Locomo",
    "LocomoLike",
    "LongMemEval",
    "LongMemEvalLike",
    "MemoryAgentBench",
    "MemoryBenchmark",
    "Question",
    "Recall",
    "stale",
]
