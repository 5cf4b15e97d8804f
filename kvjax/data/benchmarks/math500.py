"""MATH-500: {problem, solution, answer, subject, level, unique_id}.

500 problems of MATH (Hendrycks et al., arXiv 2103.03874) chosen by Lightman et al. (2305.20050).
"""

import threading

from kvjax.data.benchmarks.answers import BOX_PROMPT, last_box
from kvjax.data.benchmarks.base import Benchmark
from kvjax.data.benchmarks.rows import Row
from kvjax.data.task import Example, Scores


def example(row: Row) -> Example:
    """A row as an example; `info`: id, subject, level."""
    info = {
        "id": row.get("unique_id"),
        "subject": row.get("subject"),
        "level": row.get("level", kind=(int, str)),
    }
    return Example(f"{row.get('problem')}\n\n{BOX_PROMPT}", row.get("answer"), info=info)


def judge(text: str, example: Example) -> Scores:
    """1 where the last box says the same as the answer: letter for letter or, by math-verify, as
    mathematics. A text without a closed box is wrong."""
    box = last_box(text)
    if box is None:
        return {"accuracy": 0.0}
    same = "".join(box.split()) == "".join(example.answer.split())
    return {"accuracy": float(same or equivalent(box, example.answer))}


def equivalent(found: str, answer: str) -> bool:
    """Whether two LaTeX answers mean the same (math-verify: its parser, then sympy)."""
    try:
        import math_verify
    except ImportError:
        remedy = "pip install 'kvjax[eval]'"
        raise ValueError(f"benchmark 'math500': scoring needs math-verify: {remedy}") from None
    # Its time limits use signals, which only a main thread has.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    gold, guess = (
        math_verify.parse(f"\\boxed{{{latex}}}", parsing_timeout=limit) for latex in (answer, found)
    )
    return bool(math_verify.verify(gold, guess, timeout_seconds=limit))


BENCHMARK = Benchmark(
    name="math500",
    files=("math500.jsonl", "MATH-500/test.jsonl"),
    example=example,
    judge=judge,
    metrics=("accuracy",),
    requires=("math_verify",),
)
