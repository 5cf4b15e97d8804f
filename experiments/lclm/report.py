"""How an arm's result reads: a row for each, and a picture of copies and finds by ratio."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.papers import Measured
from experiments.plot import COLOURS, MARKERS
from experiments.table import Result

# What is asked at each ratio: the path in a result, its heading, and the raw text's own score.
PERCENT = {
    "copied_tokens": ("copied tokens", None),
    "copied_documents": ("copied documents", None),
    "needle": ("needle", "needle"),
    "expand.oracle": ("EXPAND, oracle", "chunks"),
    "expand.own": ("EXPAND, own choice", "chunks"),
    "expand.chunk_found": ("chunk found", None),
}
NOTES = (
    "By ratio of compression, on held-out texts; brackets: 95 % interval (t over documents, Wilson "
    "for shares). Loss is of the text between compressed spans, in nats a token; without: as if "
    "the spans had never been; raw: nothing compressed. A document is copied, and a number found, "
    "where greedy decoding would write it without a fault. EXPAND reads one chunk again as raw "
    "text: the right one (oracle), or the one that the likeliest of the replies that expand one "
    "chunk asks for. chunks raw: the same question with every chunk raw."
)


def scale(result: dict[str, Any]) -> str:
    s = result["scale"]
    weights = ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in s["weights"].items())
    steps = " + ".join(str(count) for count in s["steps"].values())
    return (
        f"{s['model']} ({weights}; decoder {s['decoder']}), vocabulary {s['vocabulary']}, windows "
        f"of {s['window']}, {steps} steps, {s['positions']:,} decoder positions; n = "
        f"{s['documents']} documents, {s['questions']} questions"
    )


def order(result: dict[str, Any]) -> tuple:
    arm = result["arm"]
    return (len(arm["ratios"]), arm["ratios"], arm["reconstruction"])


def ratios(result: dict[str, Any]) -> list[str]:
    """The ratios that were asked for, in the arm's order."""
    return [str(ratio) for ratio in result["arm"]["ratios"]]


def cells(result: dict[str, Any]) -> dict[str, str]:
    """Table cells of one arm; "4: … 8: …" where it serves several ratios."""
    quality, raw = result["quality"], result["quality"]["raw"]
    found = {
        "ratio": " ".join(ratios(result)),
        "reconstruction": "yes" if result["arm"]["reconstruction"] else "no",
        "loss": _by_ratio(result, "loss", _nats),
        "loss without": _by_ratio(result, "loss_without", _nats),
        "loss raw": _nats(raw["loss"]),
    }
    for path, (title, uncompressed) in PERCENT.items():
        found[f"{title}, %"] = _by_ratio(result, path, _percent)
        if uncompressed and f"{uncompressed} raw, %" not in found:
            found[f"{uncompressed} raw, %"] = _percent(raw[uncompressed])
    assert quality.keys() >= set(ratios(result))
    return found


def difference(result: dict[str, Any], other: dict[str, Any], name: str) -> dict[str, str]:
    """Differences of the means at ratios that both serve."""
    found = {}
    for ratio in ratios(result):
        if ratio in other["quality"]:
            ours, theirs = (r["quality"][ratio]["loss"]["mean"] for r in (result, other))
            found[f"loss at {ratio} − {name}'s"] = f"{ours - theirs:z.4f}"
    return found


def notes(result: dict[str, Any]) -> str:
    return NOTES


def value(quality: dict[str, Any], path: str) -> dict[str, float]:
    """{mean, low, high} at a dotted path."""
    node: Any = quality
    for key in path.split("."):
        node = node[key]
    return node


def _by_ratio(result: dict[str, Any], path: str, text: Any) -> str:
    found = {r: text(value(result["quality"][r], path)) for r in ratios(result)}
    if len(found) == 1:
        return next(iter(found.values()))
    return "; ".join(f"{ratio}: {each}" for ratio, each in found.items())


def _nats(x: dict[str, float]) -> str:
    return f"{x['mean']:.3f} [{x['low']:.3f}, {x['high']:.3f}]"


def _percent(x: dict[str, float]) -> str:
    return f"{100 * x['mean']:.1f} [{100 * x['low']:.1f}, {100 * x['high']:.1f}]"


def draw(_: str, group: Sequence[Result]) -> Figure:
    """Loss, copied tokens, needles and EXPAND against the ratio, a line for each arm."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    panels = {"loss": "held-out loss, nats a token", "copied_tokens": "copied tokens, %",
              "needle": "numbers found, %", "expand.oracle": "EXPAND, %"}  # fmt: skip
    for axes, (path, title) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        _panel(axes, group, path, title)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
    return figure


def _panel(axes: Axes, group: Sequence[Result], path: str, title: str) -> None:
    times = 1.0 if path == "loss" else 100.0
    for index, each in enumerate(group):
        style = {"color": COLOURS[index % 7], "marker": MARKERS[index % 8], "capsize": 3}
        _line(axes, each, path, times, style | {"label": each.name})
        if path == "expand.oracle":
            own = style | {"linestyle": ":", "label": f"{each.name}, own choice"}
            _line(axes, each, "expand.own", times, own)
    axes.set(xlabel="ratio", ylabel=title)
    axes.set_xscale("log", base=2)
    axes.set_xticks([4, 8, 16], ["4", "8", "16"])
    axes.grid(alpha=0.3)


def _line(axes: Axes, each: Result, path: str, times: float, style: dict[str, Any]) -> None:
    asked = ratios(each.result)
    points = [value(each.result["quality"][ratio], path) for ratio in asked]
    middle = [times * p["mean"] for p in points]
    error = [[times * (p["mean"] - p["low"]) for p in points],
             [times * (p["high"] - p["mean"]) for p in points]]  # fmt: skip
    axes.errorbar([int(ratio) for ratio in asked], middle, yerr=error, **style)


def measured(results: Sequence[Result]) -> list[Measured]:
    """Held-out loss and numbers found, beside the paper's losses and its retrieval scores."""
    found = []
    for each in results:
        model, where = each.result["scale"]["model"], scale(each.result)
        for ratio in ratios(each.result):
            quality, method = each.result["quality"][ratio], f"LCLM, {each.name}, {ratio}x"
            found.append(Measured("losses", model, method, "loss", _nats(quality["loss"]), where))
            for path, table in (("needle", "main"), ("copied_tokens", "main"),
                                ("expand.oracle", "expand"), ("expand.own", "expand")):  # fmt: skip
                text = _percent(value(quality, path))
                found.append(Measured(table, model, method, f"{PERCENT[path][0]}, %", text, where))
    return found
