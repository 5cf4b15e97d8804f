"""GSM8K (Cobbe et al., arXiv 2110.14168): {question, answer}, the number after "####"."""

from kvjax.data.benchmarks.answers import final_number, number
from kvjax.data.benchmarks.base import Benchmark
from kvjax.data.benchmarks.rows import Row
from kvjax.data.task import Example, Scores

PROMPT = "Please reason step by step, and write the final number after '####'."


def example(row: Row) -> Example:
    """A row as an example; `answer` is the number alone."""
    _, mark, answer = row.get("answer").rpartition("####")
    if not mark or number(answer) is None:
        raise row.error("answer", "must end with '#### ' and a number")
    return Example(f"{row.get('question')}\n\n{PROMPT}", answer.strip())


def judge(text: str, example: Example) -> Scores:
    """1 where the final number equals the answer's as a number: "1,080.00" is 1080."""
    found = final_number(text)
    return {"accuracy": float(found is not None and found == number(example.answer))}


BENCHMARK = Benchmark(
    name="gsm8k",
    files=("gsm8k.jsonl", "gsm8k/test.jsonl"),
    example=example,
    judge=judge,
    metrics=("accuracy",),
)
