"""What every task is made of: an example, and a judge of the text that a model wrote for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Example:
    """One question.

    `prompt` is text without chat markup: the content of one user message, or, where a task says
    that it asks for a completion, the text to continue. `answer` is what `Task.score` compares
    with. `target` is the text that continues a completion's prompt, for teacher forcing; empty
    elsewhere. `info` says what to group results by (depth, lines, subject) and what a judge needs.
    """

    prompt: str
    answer: str
    target: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)


# A metric's name and its value in [0, 1]; None where it takes something that has not been done.
Scores = dict[str, float | None]


class Task(Protocol):
    """A judge: `metrics` are the keys of every `score`, in the order of a table's columns."""

    @property
    def name(self) -> str: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    def score(self, text: str, example: Example) -> Scores:
        """Scores of `text`, what the model wrote after the prompt."""
        ...
