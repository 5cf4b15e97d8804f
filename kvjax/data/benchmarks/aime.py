"""AIME 2024: 30 problems whose answers are whole numbers from 0 to 999.

Both public spellings are read: {ID, Problem, Solution, Answer} and {id, problem, solution, answer}.
"""

import re
from decimal import Decimal

from kvjax.data.benchmarks.answers import BOX_PROMPT, last_box
from kvjax.data.benchmarks.base import Benchmark
from kvjax.data.benchmarks.rows import Row
from kvjax.data.task import Example, Scores


def example(row: Row) -> Example:
    """A row as an example; `info`: id."""
    answer = str(row.get("Answer", "answer", kind=(str, int))).strip()
    if not re.fullmatch(r"\d{1,3}", answer):
        raise row.error("Answer", f"must be a whole number from 0 to 999, is {answer!r}")
    problem = row.get("Problem", "problem")
    info = {"id": row.get("ID", "id", kind=(str, int))}
    return Example(f"{problem}\n\n{BOX_PROMPT}", answer, info=info)


def judge(text: str, example: Example) -> Scores:
    """1 where the last box holds one whole number and it is the answer (leading zeros drop)."""
    found = re.findall(r"-?\d+", (last_box(text) or "").replace(",", ""))
    right = len(found) == 1 and Decimal(found[0]) == Decimal(example.answer)
    return {"accuracy": float(right)}


BENCHMARK = Benchmark(
    name="aime24",
    files=("aime24.jsonl", "AIME_2024/aime_2024_problems.jsonl"),
    example=example,
    judge=judge,
    metrics=("accuracy",),
)
