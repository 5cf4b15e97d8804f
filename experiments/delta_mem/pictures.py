"""The study's pictures: arms with their intervals, recall against turns, stores against pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plot import COLOURS, MARKERS
from experiments.table import Result

Course = list[tuple[float, dict[str, float]]]  # where, and {mean, low, high} there


def arms(title: str, group: Sequence[Result]) -> Figure:
    """A line for each arm with its score and interval; seen and unseen in two panels."""
    sides = [[r for r in group if r.result["arm"]["context"] is seen] for seen in (True, False)]
    sides = [side for side in sides if side]
    tall = 1.5 + 0.32 * max(len(side) for side in sides)
    figure = Figure(figsize=(6.5 * len(sides), tall), layout="constrained")
    axes = figure.subplots(1, len(sides), squeeze=False, sharex=True)[0]
    for panel, side in zip(axes, sides, strict=True):
        _forest(panel, side)
    figure.suptitle(title, fontsize=9)
    return figure


def _forest(axes: Axes, side: Sequence[Result]) -> None:
    seen = side[0].result["arm"]["context"]
    for place, each in enumerate(side):
        score = each.result["quality"]["score"]
        low, high = _errors(score)
        colour = COLOURS[("", "memory", "lora").index(each.result["arm"]["kind"])]
        axes.errorbar(100 * score["mean"], place, xerr=[[low], [high]], fmt="o", capsize=3,
                      color=colour)  # fmt: skip
    axes.set_yticks(range(len(side)), [each.result["arm"]["name"] for each in side])
    axes.set(xlabel="score, %", title="history in view" if seen else "history not in view")
    axes.invert_yaxis()
    axes.grid(alpha=0.3)


def recall(title: str, group: Sequence[Result]) -> Figure:
    """Score against the turns since the fact, a line for each arm."""
    lines: dict[str, Course] = {}
    for each in group:
        turns = each.result["scale"]["benchmark"]["turns"]
        course = lines.setdefault(each.result["arm"]["name"], [])
        course.append((turns, each.result["quality"]["score"]))
    return _courses(title, lines, "turns since the fact", 10)


def stores(title: str, group: Sequence[Result]) -> Figure:
    """Recalled values against pairs, a line for each kind of store."""
    lines: dict[str, Course] = {
        each.name.removeprefix("mqar-"): [(int(n), x) for n, x in each.result["recalled"].items()]
        for each in group
    }
    return _courses(title, lines, "pairs written", 2)


def _courses(title: str, lines: dict[str, Course], label: str, base: int) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for index, (name, course) in enumerate(lines.items()):
        course.sort(key=lambda point: point[0])
        errors = list(zip(*(_errors(x) for _, x in course), strict=True))
        style: dict[str, Any] = {"color": COLOURS[index % 7], "marker": MARKERS[index % 8]}
        axes.errorbar([at for at, _ in course], [100 * x["mean"] for _, x in course], yerr=errors,
                      capsize=3, label=name, **style)  # fmt: skip
    axes.set_xscale("log", base=base)
    ticks = sorted({at for course in lines.values() for at, _ in course})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set(xlabel=label, ylabel="recalled, %", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    return figure


def _errors(x: dict[str, float]) -> tuple[float, float]:
    return 100 * (x["mean"] - x["low"]), 100 * (x["high"] - x["mean"])
