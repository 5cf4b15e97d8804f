"""A row of each benchmark in its public format, of our own making, and folders of them."""

import json
from pathlib import Path
from typing import Any

ROWS: dict[str, dict[str, Any]] = {
    "math500": {
        "problem": "What is half of $\\frac{2}{3}$?",
        "solution": "Half of it is $\\boxed{\\frac{1}{3}}$.",
        "answer": "\\frac{1}{3}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
    "aime24": {
        "ID": "2024-I-0",
        "Problem": "Find the remainder of $7^2$ divided by $40$.",
        "Solution": "$49 = 40 + 9$, so $\\boxed{009}$.",
        "Answer": 9,
    },
    "humaneval": {
        "task_id": "HumanEval/900",
        "prompt": 'import math\n\n\ndef area(r: float) -> float:\n    """Area of a disc."""\n',
        "entry_point": "area",
        "canonical_solution": "    return math.pi * r * r\n",
        "test": "def check(candidate):\n    assert round(candidate(1.0), 2) == 3.14\n",
    },
    "gsm8k": {
        "question": "A box holds 540 pens. How many do two hold?",
        "answer": "Two hold 2 * 540 = <<2*540=1080>>1080 pens.\n#### 1,080",
    },
    "ifeval": {
        "key": 1000,
        "prompt": "Name two rivers. Use no commas and at least 3 words.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"relation": "at least", "num_words": 3}],
    },
}


def write(folder: Path, name: str, *rows: dict[str, Any]) -> Path:
    """`name`.jsonl with `rows`."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path
