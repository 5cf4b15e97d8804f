"""Real text by name and tasks over it. Nothing is downloaded here.

Texts come from packages that are already installed, retrieval prompts from a seed, benchmarks from
files that a person has.
"""

from kvjax.data.benchmarks import BENCHMARKS, Benchmark
from kvjax.data.corpora import SOURCES, Text, load_text, titles
from kvjax.data.retrieval import Lines, Needles, Passkey
from kvjax.data.task import Example, Scores, Task

__all__ = [
    "BENCHMARKS",
    "SOURCES",
    "Benchmark",
    "Example",
    "Lines",
    "Needles",
    "Passkey",
    "Scores",
    "Task",
    "Text",
    "load_text",
    "titles",
]
