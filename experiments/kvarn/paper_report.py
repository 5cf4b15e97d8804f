"""How a result of the paper's own setting reads."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.table import Result

notes = (
    "Means over prompts and repeats in %, ± the standard deviation over repeats, in brackets the "
    "95 % t interval over prompts. Bits are per key or value element of the longest prompt and its "
    "answer, all metadata, sinks and exact tokens included. Finished: answers that ended before "
    "the limit. HumanEval's programs are kept and not run, so it has no score here."
)
ORDER = ("fp16", "turboquant", "kivi", "quarot", "kitty", "kvarn", "heed")


def scale(result: dict[str, Any]) -> str:
    """One line that says what the numbers are about; equal lines are comparable."""
    s = result["scale"]
    some = f" of {s['total']}" * (s["problems"] < s["total"])
    return (
        f"{s['model']} ({s['parameters'] / 1e6:,.0f}M parameters, {s['dtype']}), {s['benchmark']}, "
        f"n = {s['problems']}{some} prompts × {s['repeats']} repeats, "
        f"at most {s['max_new']:,} new tokens"
    )


def order(result: dict[str, Any]) -> tuple[int, str]:
    """The paper's methods first, in its order."""
    method = result["scale"]["method"]
    return (ORDER.index(method) if method in ORDER else len(ORDER), method)


def cells(result: dict[str, Any]) -> dict[str, str]:
    """The row of one result, as text."""
    n = f"(n = {result['scale']['problems']} × {result['scale']['repeats']})"
    scores = {f"{m}, % {n}": _score(s) for m, s in result["scores"].items()}
    answers = result["answers"]
    return scores | {
        "bits": f"{result['size']['bits_per_element']:.2f}",
        "tokens an answer": f"{answers['mean_tokens']:.0f}",
        "finished, %": f"{100 * answers['finished']:.1f}",
    }


def together(_: Sequence[Result]) -> dict[str, dict[str, str]]:
    """Nothing that needs another row."""
    return {}


def draw(scale: str, group: Sequence[Result]) -> Figure:
    """Scores against bits per element, a panel for each metric, with their intervals."""
    metrics = list(group[0].result["scores"])
    figure = Figure(figsize=(6 * len(metrics), 5), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for each in group:
            score, bits = each.result["scores"][metric], each.result["size"]["bits_per_element"]
            if score is not None:
                mean, low, high = (100 * score[key] for key in ("mean", "low", "high"))
                axes.errorbar(bits, mean, [[mean - low], [high - mean]], fmt="o", capsize=3)
                axes.annotate(each.result["scale"]["method"], (bits, mean), (8, 4),
                              textcoords="offset points")  # fmt: skip
        axes.set(xlabel="bits per element of the whole cache", ylabel=f"{metric}, %")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(scale, fontsize=9)
    return figure


def _score(score: dict[str, Any] | None) -> str:
    if score is None:
        return ""
    return f"{percent(score)} [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"


def percent(score: dict[str, Any]) -> str:
    """Mean ± deviation over repeats, where there is more than one."""
    spread = "" if score["std"] is None else f" ± {100 * score['std']:.1f}"
    return f"{100 * score['mean']:.1f}{spread}"
