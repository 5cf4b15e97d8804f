"""The picture of a study, from results alone: quality against bytes, and its course by quarter.

    python -m experiments.plot --workdir=DIR

A result needs `quality.kl`, `quality.kl_by_quarter` and `size.bytes`; a study whose results have
others brings its own `draw` (see `experiments.table`).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from experiments import table

# Okabe and Ito's colours are told apart by colour-blind readers too. Markers have another period,
# so that no two of the first 56 rows look alike.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*"


def draw(scale: str, group: Sequence[table.Result]) -> Figure:
    """Left: KL to the exact cache against bytes. Right: KL by quarter of the text."""
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    lossy = [each for each in group if each.result["quality"]["kl"]["mean"] > 0]
    bottom = min((each.result["quality"]["kl"]["mean"] for each in lossy), default=0.0) / 10
    for index, each in enumerate(lossy):
        style = {"color": COLOURS[index % 7], "marker": MARKERS[index % 8], "markersize": 8}
        _point(left, each, style, _crowded(each, lossy))
        # A quarter without loss (but for rounding) is a gap on a logarithmic axis, not a fall.
        course = each.result["quality"]["kl_by_quarter"]
        quarters = [kl if kl > bottom else float("nan") for kl in course]
        right.plot((1, 2, 3, 4), quarters, label=each.name, **style)
    for each in group:
        if each not in lossy:
            _lossless(left, each)
    left.set(xlabel="measured bytes of the cache, MB", ylabel="KL to the exact cache, nats")
    right.set(xlabel="quarter of the text", ylabel="KL, nats", xticks=(1, 2, 3, 4))
    _finish(left, right)
    if lossy:
        right.set_ylim(bottom=bottom)
    figure.suptitle(scale, fontsize=9)
    return figure


def _point(axes: Axes, each: table.Result, style: dict, to_the_left: bool) -> None:
    """One row with its interval; the label names it beside the marker."""
    kl, megabytes = each.result["quality"]["kl"], each.result["size"]["bytes"] / 1e6
    low = max(kl["low"], kl["mean"] / 20)  # an interval that reaches 0 leaves a logarithmic axis
    error = [[kl["mean"] - low], [kl["high"] - kl["mean"]]]
    axes.errorbar(megabytes, kl["mean"], yerr=error, capsize=3, elinewidth=1, **style)
    offset, side = ((-8, 4), "right") if to_the_left else ((8, 4), "left")
    place = (megabytes, kl["mean"])
    axes.annotate(each.name, place, offset, textcoords="offset points", size=9, ha=side)


def _crowded(each: table.Result, others: Sequence[table.Result]) -> bool:
    """Whether a point stands where a label to the right would go."""
    kl, size = each.result["quality"]["kl"]["mean"], each.result["size"]["bytes"]
    return any(
        1 < other.result["size"]["bytes"] / size < 1.5
        and 2 / 3 < other.result["quality"]["kl"]["mean"] / kl < 3 / 2
        for other in others
    )


def _lossless(axes: Axes, each: table.Result) -> None:
    """A row whose KL is 0 has no place on a logarithmic axis: a line at its bytes."""
    megabytes = each.result["size"]["bytes"] / 1e6
    axes.axvline(megabytes, color="0.5", linestyle=":")
    axes.annotate(f"{each.name} (KL 0) ", (megabytes, 0.02), xycoords=("data", "axes fraction"),
                  rotation=90, ha="right", va="bottom", size=9, color="0.4")  # fmt: skip


def _finish(left: Axes, right: Axes) -> None:
    left.set_xscale("log")
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_major_formatter(ScalarFormatter())
    left.xaxis.set_minor_formatter(NullFormatter())
    for axes in (left, right):
        axes.set_yscale("log")
        axes.grid(True, which="both", alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    if right.lines:
        lines = sorted(right.lines, key=lambda line: -np.asarray(line.get_ydata())[-1])
        right.legend(handles=lines, fontsize=8, frameon=False, loc="center left",
                     bbox_to_anchor=(1, 0.5))  # fmt: skip


def write(results: Sequence[table.Result], workdir: Path) -> list[Path]:
    """One picture a scale, `result.png` and `result.svg` (then `result-2…`); returns the paths."""
    paths = []
    for index, (scale, group) in enumerate(table.by_scale(results), start=1):
        figure = getattr(table.report_of(group[0]), "draw", draw)(scale, group)
        for ending in ("png", "svg"):
            paths.append(workdir / f"result{f'-{index}' if index > 1 else ''}.{ending}")
            figure.savefig(paths[-1], dpi=150, metadata={"Date": None} if ending == "svg" else None)
    return paths


def main(_: list[str]) -> int:
    workdir = Path(flags.FLAGS.workdir)
    results = table.load(workdir)
    if not results:
        print(f"error: no result in {workdir}/points; run experiments.launch first")
        return 2
    for path in write(results, workdir):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "a workdir of launch or sweep", required=True)
    app.run(main)
