"""Where our results of the KVarN study stand beside the paper's tables."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.head_to_head import report as head_to_head
from experiments.kvarn import paper_report
from experiments.papers import Measured
from experiments.statistics import mean_interval
from experiments.table import Result, by_scale

# Our names of the paper's rows; other methods keep ours.
METHODS = {
    "fp16": "FP16", "exact": "FP16", "kivi": "KIVI", "quarot": "QuaRot",
    "turboquant": "TurboQuant (vLLM)", "kvarn": "KVarN",
}  # fmt: skip
# Published table and metric of a benchmark's own metric.
PLACES = {
    ("aime24", "accuracy"): ("generation", "AIME24"),
    ("math500", "accuracy"): ("generation", "MATH500"),
    ("humaneval", "pass@1"): ("generation", "HumanEval"),
    ("ifeval", "strict"): ("ifeval", "IFEval strict"),
    ("ifeval", "loose"): ("ifeval", "IFEval loose"),
}
for _count in range(100, 601, 100):
    PLACES[f"lines_{_count}", "accuracy"] = ("line_retrieval", f"{_count} lines")


def measured(results: Sequence[Result]) -> Iterator[Measured]:
    """Our numbers, each with the table that it belongs to."""
    parts = {"paper": _paper, "drift": _drift, "paired": _paired}
    for _, group in by_scale([each for each in results if each.result["part"] in parts]):
        for each in group:
            yield from parts[each.result["part"]](each)


def _drift(each: Result) -> Iterator[Measured]:
    """Our drift study, on another model than the paper's and so with its scale over it."""
    result, s = each.result, each.result["scale"]
    cells = {"KL, nats": f"{_interval(result['quality']['kl'])} (n = {s['positions']:,})"}
    if result["bits"]:
        cells = {"bits per element": f"{result['bits']['mean']:.3f}"} | cells
    for metric, text in cells.items():
        yield Measured("drift", s["model"], each.name, metric, text, head_to_head.scale(result))


def _paired(each: Result) -> Iterator[Measured]:
    """The paper's own measure of drift, decode (its pseudo-decode) and static."""
    s, blocks = each.result["scale"], np.asarray(each.result["blocks"]["attention_mae"])
    n = f"(n = {s['positions']:,})"
    scale = head_to_head.scale({"scale": s | {"regime": "beside the exact cache"}})
    cells = {
        "attention MAE": f"{_interval(mean_interval(blocks)._asdict())} {n}",
        "KL, nats": f"{_interval(each.result['quality']['kl'])} {n}",
    }
    for metric, text in cells.items():
        yield Measured("drift", s["model"], each.name, metric, text, scale)


def _interval(x: dict[str, Any]) -> str:
    return f"{x['mean']:z.4f} [{x['low']:z.4f}, {x['high']:z.4f}]"


def _paper(each: Result) -> Iterator[Measured]:
    """The paper's own setting: a benchmark that no table of the paper has is left out."""
    s = each.result["scale"]
    method = METHODS.get(s["method"], s["method"])
    for metric, score in each.result["scores"].items():
        place = PLACES.get((s["benchmark"], metric))
        if place and score is not None:
            text = f"{paper_report.percent(score)} (n = {s['problems']} × {s['repeats']})"
            yield Measured(
                place[0], s["model"], method, place[1], text, paper_report.scale(each.result)
            )
