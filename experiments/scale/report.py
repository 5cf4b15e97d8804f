"""How compiled sizes read: a table and a curve for each slice, and a table of training slices."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.plot import COLOURS, MARKERS
from experiments.table import Result

GIB = 2**30
NOTES = {
    "inference": (
        "GiB of one chip at the peak, Qwen3-4B in bfloat16 at batch 1, from the compiler's memory "
        "analysis: compiled, not run. The larger of: an encoder pass with all weights resident "
        "(encoder), and a prefill chunk or decoding step over a cache of context / N tokens with "
        "the encoder's weights beside it. A question's own tokens are not counted. > marks what "
        "does not fit: the compiler's figure of what it would take, which counts the cache twice, "
        "as what goes in and as what comes out; where it fits these are one."
    ),
    "training": (
        "GiB of one chip at the peak of the end-to-end step, weights and optimizer over all chips, "
        "from the compiler's memory analysis: compiled, not run. Tokens are decoder positions of a "
        "step after compression; encoder tokens are those its windows can hold."
    ),
}


def scale(result: dict[str, Any]) -> str:
    s = result["scale"]
    if result["part"] == "training":
        return f"training, {s['rows']} rows of {s['length']:,} positions a step"
    return f"inference on {s['slice']} ({s['chips']} chips), prefill in chunks of {s['chunk']}"


def order(result: dict[str, Any]) -> tuple:
    if result["part"] == "training":
        return (result["scale"]["slice"].partition(":")[0], result["scale"]["chips"])
    return (-result["curve"][-1]["decoder_bytes"],)


def cells(result: dict[str, Any]) -> dict[str, str]:
    """Columns by context; of a training slice its size and what a step takes."""
    if result["part"] == "training":
        return _training(result["scale"], result["step"])
    found = {"encoder": _gib(result["encoder"]) if "encoder" in result else "–"}
    for point in result["curve"]:
        found[_tokens(point["context"])] = _gib(point)
    return found


def _training(scale: dict[str, Any], step: dict[str, Any]) -> dict[str, str]:
    return {
        "slice": scale["slice"],
        "chips": str(scale["chips"]),
        "GiB a chip": _gib(step),
        "rows × micro-batches": f"{scale['rows'] // scale['micro']} × {scale['micro']}",
        "tokens a step": f"{scale['tokens']:,}",
        "encoder tokens a step": f"{scale['encoder_tokens']:,}",
    }


def _gib(point: dict[str, Any]) -> str:
    return f"{'' if point['fits'] else '> '}{point['peak_bytes'] / GIB:.2f}"


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count < 2**20 else f"{count // 2**20}M"


def notes(result: dict[str, Any]) -> str:
    return NOTES[result["part"]]


def draw(scale: str, group: Sequence[Result]) -> Figure:
    """Peak bytes against the context, a line for each method; training slices as bars."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{scale}: compiled, not run", fontsize=10)
    if group[0].result["part"] == "training":
        names = [each.result["scale"]["slice"] for each in group]
        steps = [each.result["step"] for each in group]
        colours = [COLOURS[0] if step["fits"] else "0.75" for step in steps]
        axes.bar(names, [step["peak_bytes"] / GIB for step in steps], color=colours)
        axes.set(ylabel="GiB a chip (grey: does not fit)")
        return figure
    for index, each in enumerate(group):
        curve = each.result["curve"]
        sizes = [point["peak_bytes"] / GIB for point in curve]
        style: dict[str, Any] = {"color": COLOURS[index % 7], "marker": MARKERS[index % 8]}
        axes.plot([p["context"] for p in curve], sizes, label=each.config["method"], **style)
        for point in curve:
            if not point["fits"]:
                axes.scatter(point["context"], point["peak_bytes"] / GIB, s=160, marker="x", c="k")
    axes.set(xlabel="context, tokens", ylabel="GiB a chip (crossed: does not fit)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := [p["context"] for p in group[0].result["curve"]],
                    [_tokens(x) for x in ticks])  # fmt: skip
    axes.legend()
    axes.grid(alpha=0.3)
    return figure
