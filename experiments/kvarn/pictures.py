"""The study's pictures, from results alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plot import COLOURS, MARKERS
from experiments.table import Result

BINS = 16  # of positions
FEW_BITS = 3.05  # rows of up to so many bits are followed over positions


def drift(scale: str, group: Sequence[Result]) -> Figure:
    """Left: KL against the encoder's bits. Right: KL against position, rows of few bits."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = family_styles(group)
    for each in group:
        if each.result["bits"] is None:
            continue
        style, kl = styles[family(each)], each.result["quality"]["kl"]
        low = max(kl["low"], kl["mean"] / 20)  # 0 has no place on a logarithmic axis
        error = [[kl["mean"] - low], [kl["high"] - kl["mean"]]]
        bits = each.result["bits"]["mean"]
        left.errorbar(bits, kl["mean"], yerr=error, capsize=2, elinewidth=0.8, **style)
        left.annotate(each.name, (bits, kl["mean"]), (5, 3), textcoords="offset points", size=7)
    for each in best_of_families(group):
        kl = np.asarray(each.result["blocks"]["kl"])
        right.plot(*course(each, kl), label=each.name, **styles[family(each)])
    left.set(xlabel="bits per element, metadata included", ylabel="KL to the exact cache, nats")
    left.set(xscale="log", xticks=(2, 3, 4, 6, 8), xticklabels=("2", "3", "4", "6", "8"))
    right.set(xlabel="position, tokens", ylabel="KL, nats")
    return _finished(figure, scale, (left, right))


def paired(scale: str, group: Sequence[Result]) -> Figure:
    """Attention's error and KL by position in both regimes; magnitude's share of the key error."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    axes = figure.subplots(1, 3)
    styles = family_styles(group)
    for each in group:
        regime = each.result["scale"]["regime"]
        style = styles[family(each)] | {"linestyle": "-" if regime == "decode" else ":"}
        for where, name in zip(axes, ("attention_relative", "kl"), strict=False):
            values = np.asarray(each.result["blocks"][name])
            where.plot(*course(each, values), label=each.name, **style)
        if regime == "static":
            worst = each.result["errors"]["k"]["worst"]
            shares = [100 * row["magnitude"]["mean"] for row in worst]
            axes[2].plot([100 * row["top"] for row in worst], shares, label=each.name, **style)
    axes[0].set(xlabel="position, tokens", ylabel="error of attention's output, relative")
    axes[1].set(xlabel="position, tokens", ylabel="KL, nats")
    axes[2].set(xlabel="worst tokens, %", ylabel="magnitude's share of ‖k − k̂‖², %", xscale="log")
    return _finished(figure, scale, axes, logarithmic=axes[:2])


def retrieval(scale: str, group: Sequence[Result]) -> Figure:
    """Right answers and the log-likelihood of the right one, a bar a row."""
    figure = Figure(figsize=(12, 0.4 * len(group) + 1.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [each.name for each in group]
    for axes, what, factor in ((left, "accuracy", 100), (right, "nll", 1)):
        found = [each.result[what] for each in group]
        mean = factor * np.asarray([x["mean"] for x in found])
        ends = factor * np.asarray([[x["low"] for x in found], [x["high"] for x in found]])
        axes.barh(names, mean, color=COLOURS[0], height=0.6,
                  xerr=np.abs(ends - mean), error_kw={"capsize": 3, "elinewidth": 1})  # fmt: skip
    left.set(xlabel="right answers, %", xlim=(0, 105))
    right.set(xlabel="negative log-likelihood of the right answer, nats")
    left.invert_yaxis()
    return _finished(figure, scale, (left, right), logarithmic=())


def family(each: Result) -> str:
    """The encoder and what distinguishes it, without its widths."""
    encode = dict(each.config["cache"]["encode"])
    words = [encode.pop("name")]
    words += [str(encode[key]) for key in ("key_axis", "format", "product") if key in encode]
    words += [each.config["exact_tokens"]["which"]] if "exact_tokens" in each.config else []
    return " ".join(words)


def family_styles(group: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """One colour and marker a family; markers have another period than colours."""
    names = list(dict.fromkeys(family(each) for each in group))
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)],
               "markersize": 5}
        for i, name in enumerate(names)
    }  # fmt: skip


def best_of_families(group: Sequence[Result]) -> list[Result]:
    """The best row of few bits of every family."""
    best: dict[str, Result] = {}
    for each in group:
        bits = each.result["bits"]
        if bits is None or bits["mean"] > FEW_BITS:
            continue
        other = best.get(family(each))
        if other is None or _kl(each) < _kl(other):
            best[family(each)] = each
    return list(best.values())


def _kl(each: Result) -> float:
    return each.result["quality"]["kl"]["mean"]


def course(each: Result, blocks: np.ndarray) -> tuple[list[float], list[float]]:
    """Middles of the bins of positions, and the means of block means [texts, blocks] in them.

    The first bin's blocks that nothing encoded precedes count as well: their values are small.
    """
    block, count = each.result["scale"]["block"], blocks.shape[1]
    parts = np.array_split(np.arange(count), min(BINS, count))
    middles = [float((part.mean() + 0.5) * block) for part in parts]
    return middles, [float(blocks[:, part].mean()) for part in parts]


def _finished(
    figure: Figure, scale: str, axes: Sequence[Axes], logarithmic: Sequence[Axes] | None = None
) -> Figure:
    for each in axes if logarithmic is None else logarithmic:
        each.set_yscale("log")
    for each in axes:
        each.grid(True, which="both", alpha=0.2)
        each.spines[["top", "right"]].set_visible(False)
    named = [line for line in axes[-1].lines if not str(line.get_label()).startswith("_")]
    lines = sorted(named, key=lambda line: -np.asarray(line.get_ydata())[-1])
    if lines:
        axes[-1].legend(handles=lines, fontsize=8, frameon=False, loc="center left",
                        bbox_to_anchor=(1, 0.5))  # fmt: skip
    figure.suptitle(scale, fontsize=9)
    return figure
