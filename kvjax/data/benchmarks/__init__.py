"""Public benchmarks by name: `BENCHMARKS["math500"].load(folder)`.

The files are a person's own copies in their public formats; nothing is downloaded. `missing` and
`unmet` say before a long run which files and packages are not there.
"""

from kvjax.data.benchmarks import aime, gsm8k, humaneval, ifeval, math500
from kvjax.data.benchmarks.base import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        math500.BENCHMARK,
        aime.BENCHMARK,
        humaneval.BENCHMARK,
        gsm8k.BENCHMARK,
        ifeval.BENCHMARK,
    )
}

__all__ = ["BENCHMARKS", "Benchmark"]
