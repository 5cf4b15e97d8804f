"""HumanEval (Chen et al., arXiv 2107.03374): {task_id, prompt, entry_point, canonical_solution,
test}. Builds the program that decides, and does not run it: generated code needs a sandbox."""

import re

from kvjax.data.benchmarks.base import Benchmark
from kvjax.data.benchmarks.rows import Row
from kvjax.data.task import Example, Scores

PROMPT = "Complete this Python function. Answer with the whole function in one ```python block."
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")  # the paper's, for plain completions
_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def example(row: Row) -> Example:
    """A row as an example; `answer` is the canonical solution; `info`: id and the row's code."""
    info = {
        "id": row.get("task_id"),
        "prompt": row.get("prompt"),
        "entry_point": row.get("entry_point"),
        "test": row.get("test"),
    }
    if not info["entry_point"].isidentifier():
        raise row.error("entry_point", f"must be a function's name, is {info['entry_point']!r}")
    message = f"{PROMPT}\n\n```python\n{info['prompt'].strip()}\n```"
    return Example(message, row.get("canonical_solution"), info=info)


def program(text: str, example: Example) -> str:
    """Source that ends without an error where `text` solves the problem.

    `text` is an answer with a fenced block, whose function replaces the prompt's, or the plain
    continuation of the row's own prompt, cut where the paper cuts it.
    """
    prompt, entry = example.info["prompt"], example.info["entry_point"]
    blocks = _BLOCK.findall(text)
    code = next((b for b in reversed(blocks) if re.search(rf"\bdef {entry}\b", b)), None)
    if code is None:
        code = blocks[-1] if blocks else text[: _first_stop(text)]
    # The prompt alone, a signature and its docstring, is a whole function, and brings imports.
    joint = "\n" if re.search(rf"^def {entry}\b", code, re.MULTILINE) else ""
    return f"{prompt}{joint}{code}\n{example.info['test']}\ncheck({entry})\n"


def _first_stop(text: str) -> int:
    return min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=len(text))


def judge(text: str, example: Example) -> Scores:
    """None, "not executed": generated code is not run here; `program` gives it to a sandbox."""
    return {"pass@1": None}


BENCHMARK = Benchmark(
    name="humaneval",
    files=("HumanEval.jsonl", "humaneval.jsonl"),
    example=example,
    judge=judge,
    metrics=("pass@1",),
)
