"""Where our results of the KVarN study stand beside the paper's tables."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.kvarn import paper_report
from experiments.papers import Measured
from experiments.statistics import mean_interval
from experiments.table import Result, by_scale

# Our names of the paper's rows; other methods keep ours.
METHODS = {
    "fp16": "FP16", "kivi": "KIVI", "quarot": "QuaRot",
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
    for scale, group in by_scale(results):
        for each in group:
            for place, text in _PARTS[each.result["part"]](each):
                yield Measured(*place, text, scale)


# (table, model, method, metric) and the text of each number of one result.
_Cells = Iterator[tuple[tuple[str, str, str, str], str]]


def _drift(each: Result) -> _Cells:
    """Our drift study, on another model than the paper's and so under its table."""
    where, n = ("drift", each.result["scale"]["model"], each.name), _positions(each)
    if each.result["bits"]:
        yield (*where, "bits per element"), f"{each.result['bits']['mean']:.3f}"
    yield (*where, "KL, nats"), f"{_interval(each.result['quality']['kl'])} {n}"


def _paired(each: Result) -> _Cells:
    """The paper's own measure of drift, decode (its pseudo-decode) and static."""
    where, n = ("drift", each.result["scale"]["model"], each.name), _positions(each)
    error = mean_interval(np.asarray(each.result["blocks"]["attention_mae"]))
    yield (*where, "attention MAE"), f"{_interval(error._asdict())} {n}"
    yield (*where, "KL, nats"), f"{_interval(each.result['quality']['kl'])} {n}"


def _retrieval(each: Result) -> _Cells:
    """Lines alone: the paper has no table of the other tasks."""
    s, right = each.result["scale"], each.result["accuracy"]
    if s["task"] == "lines":
        where = ("line_retrieval", s["model"], each.name.removeprefix("lines-"))
        if each.result["bits"]:
            yield (*where, "bits per element"), f"{each.result['bits']['mean']:.3f}"
        low, high = 100 * right["low"], 100 * right["high"]
        text = f"{100 * right['mean']:.1f} [{low:.1f}, {high:.1f}] (n = {s['n']})"
        yield (*where, "lines found, %"), text


def _paper(each: Result) -> _Cells:
    """The paper's own setting: a benchmark that no table of the paper has is left out."""
    s = each.result["scale"]
    method = METHODS.get(s["method"], s["method"])
    for metric, score in each.result["scores"].items():
        place = PLACES.get((s["benchmark"], metric))
        if place and score is not None:
            text = f"{paper_report.percent(score)} (n = {s['problems']} × {s['repeats']})"
            yield (place[0], s["model"], method, place[1]), text


_PARTS = {"drift": _drift, "paired": _paired, "retrieval": _retrieval, "paper": _paper}


def _positions(each: Result) -> str:
    return f"(n = {each.result['scale']['positions']:,})"


def _interval(x: dict[str, Any]) -> str:
    return f"{x['mean']:z.4f} [{x['low']:z.4f}, {x['high']:z.4f}]"
