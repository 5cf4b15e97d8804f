"""A benchmark as data: where its file lies, how a row becomes an example, how text is judged."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvjax.data.benchmarks.rows import Row, read_rows
from kvjax.data.task import Example, Scores


@dataclass(frozen=True)
class Benchmark:
    """A `Task` whose examples are the rows of one file.

    `files`: paths below a data folder where the file is looked for, the usual one first; each also
    with `.gz` after it. `example` makes a row (or raises `ValueError` naming file, line and field)
    into an example whose prompt is one user message. `judge` is `score`. `requires`: modules that
    scoring imports, all in the `eval` extra.
    """

    name: str
    files: tuple[str, ...]
    example: Callable[[Row], Example]
    judge: Callable[[str, Example], Scores]
    metrics: tuple[str, ...]
    requires: tuple[str, ...] = ()

    def find(self, folder: Path | str) -> Path | None:
        """The first of `files` that is in `folder`."""
        names = [name + end for name in self.files for end in ("", ".gz")]
        paths = (Path(folder) / name for name in names)
        return next((path for path in paths if path.is_file()), None)

    def missing(self, folder: Path | str) -> list[str]:
        """Local files still to be put into `folder`: empty, or the usual path of the one."""
        return [] if self.find(folder) else [str(Path(folder) / self.files[0])]

    def unmet(self) -> list[str]:
        """Modules of `requires` that are not installed."""
        return [name for name in self.requires if importlib.util.find_spec(name) is None]

    def load(self, folder: Path | str) -> list[Example]:
        """All examples, in the file's order. `ValueError` names file, line and field."""
        path = self.find(folder)
        if path is None:
            places = ", ".join(self.files)
            raise ValueError(f"benchmark {self.name!r}: no file in {folder}; put one at {places}")
        return [self.example(row) for row in read_rows(path)]

    def score(self, text: str, example: Example) -> Scores:
        """Scores of the model's `text`; `ValueError` where a package of `requires` is not there."""
        return self.judge(after_thinking(text), example)


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of it where there is none."""
    return text.rpartition("</think>")[2]
