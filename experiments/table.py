"""Tables from results alone: `result.md`, `result.csv` and `result.tex`.

    python -m experiments.table --workdir=DIR [--versus=rtn-2]
    python -m experiments.table --paper=kvarn [--workdir=DIR] [--format=markdown]

Rows of one scale (model, texts, lengths) stand in one table, and the scale stands over it. Nothing
is filled in: what a result lacks is an empty cell, a point without a result is listed as missing.
`--versus` adds the paired difference of every row to that row. Every row's config, commit and
command are in the CSV; the Markdown has the commit in the row and the commands below.

A study's `report` module says how its results read: `scale(result)`, one line, equal where numbers
may be compared; `order(result)`, a sort key; `cells(result)`, {column: text}; `difference(result,
other, name)`, the same for `--versus`; `notes(result)`, a paragraph; where cells need other rows of
the table, `together(group)`, {row: cells}; for a last table over all scales, `summary(results)`;
and, if the picture of `experiments.plot` is not its own, `draw(scale, group)`. `--paper` is another
table: a paper's published numbers with ours beside them (see `experiments.papers`).
"""

import importlib
import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from absl import app, flags

from experiments import record


class Result(NamedTuple):
    """One finished point, as its folder tells it."""

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]


def load(workdir: Path) -> list[Result]:
    """The finished points of a workdir, by folder name."""
    folders = [path.parent for path in sorted(workdir.glob("points/*/result.json"))]
    files = ("config.json", "environment.json", "result.json")
    return [Result(f.name, *(record.read_json(f / name) for name in files)) for f in folders]


def missing(workdir: Path) -> list[str]:
    """Names of the points that were begun and have no result."""
    folders = [path for path in sorted(workdir.glob("points/*")) if path.is_dir()]
    return [folder.name for folder in folders if not (folder / "result.json").exists()]


def report_of(result: Result) -> Any:
    """The study's own `report` module: what a scale and a row look like."""
    return importlib.import_module(f"experiments.{result.config['experiment']}.report")


def by_scale(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Groups of results whose numbers may stand side by side, each in the study's order."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(report_of(result).scale(result.result), []).append(result)
    for scale, group in groups.items():
        yield scale, sorted(group, key=lambda r: report_of(r).order(r.result))


def frame(group: Sequence[Result], versus: str = "") -> pd.DataFrame:
    """The cells of one table, as text; a column is there when some row has it."""
    against = next((r for r in group if r.name == versus), None)
    report = report_of(group[0])
    together = report.together(group) if hasattr(report, "together") else {}
    rows = []
    for each in group:
        cells = {"cache": each.name, **report.cells(each.result), **together.get(each.name, {})}
        if against is not None:
            cells |= report.difference(each.result, against.result, versus)
        rows.append(cells)
    commits = [_short(each.environment["commit"]) for each in group]
    return pd.DataFrame(rows).fillna("").assign(commit=commits)


def _short(commit: str | None) -> str:
    if not commit:
        return ""
    head, plus, changes = commit.partition("+")
    return head[:9] + plus + changes


def markdown(results: Sequence[Result], unfinished: Sequence[str], versus: str = "") -> str:
    """All tables, what is missing, and how each row was made."""
    parts = []
    for scale, group in by_scale(results):
        table = frame(group, versus).to_markdown(index=False, disable_numparse=True)
        parts += [f"**{scale}**", table, report_of(group[0]).notes(group[0].result)]
    for report in dict.fromkeys(report_of(each) for each in results):
        last = report.summary(results) if hasattr(report, "summary") else ""
        parts += [last] if last else []
    if unfinished:
        parts.append("No result: " + ", ".join(unfinished) + ".")
    commands = dict.fromkeys(each.environment["command"] for each in results)
    parts.append("Made by:\n\n" + "\n".join(f"    {command}" for command in commands))
    return "\n\n".join(parts) + "\n"


def latex(results: Sequence[Result], versus: str = "") -> str:
    """All tables in LaTeX (booktabs)."""
    return "\n".join(
        frame(group, versus)
        .drop(columns="commit")
        .style.hide(axis="index")
        .format(escape="latex")
        .format_index(escape="latex", axis="columns")
        .to_latex(caption=_escape(scale), hrules=True)
        for scale, group in by_scale(results)
    )


def _escape(text: str) -> str:
    for sign in "%&_#$":
        text = text.replace(sign, "\\" + sign)
    return text


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested results as {"quality.kl.mean": 0.1}; lists as JSON."""
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{path}.{key}").items()}
    return {path.lstrip("."): json.dumps(value) if isinstance(value, list) else value}


def csv(results: Sequence[Result]) -> str:
    """Every number of every result, in full, with config, commit and command."""
    rows = []
    for _, group in by_scale(results):
        for each in group:
            origin = {key: each.environment[key] for key in ("commit", "command")}
            config = {"config": json.dumps(each.config, sort_keys=True)}
            rows.append(flat(each.result) | origin | config)
    return pd.DataFrame(rows).to_csv(index=False)


def write(results: Sequence[Result], workdir: Path, versus: str = "") -> list[Path]:
    """Writes the three files; returns their paths."""
    texts = {
        "result.md": markdown(results, missing(workdir), versus),
        "result.csv": csv(results),
        "result.tex": latex(results, versus),
    }
    for name, text in texts.items():
        (workdir / name).write_text(text, "utf-8")
    return [workdir / name for name in texts]


def main(_: list[str]) -> int:
    if flags.FLAGS.paper:
        return paper_main()
    if not flags.FLAGS.workdir:
        print("error: --workdir: missing; name a workdir of launch or sweep, or a --paper")
        return 2
    workdir, versus = Path(flags.FLAGS.workdir), flags.FLAGS.versus
    results = load(workdir)
    if not results:
        print(f"error: no result in {workdir}/points; run experiments.launch first")
        return 2
    if versus and versus not in [each.name for each in results]:
        print(f"error: --versus={versus}: choose one of {', '.join(r.name for r in results)}")
        return 2
    paths = write(results, workdir, versus)
    print(paths[0].read_text("utf-8"))
    return 0


def paper_main() -> int:
    """A paper's tables; our numbers come from `--workdir`, by default results/<paper>."""
    from experiments import papers  # reads results by this module

    name, given = flags.FLAGS.paper, flags.FLAGS.workdir
    workdir = Path(given or f"results/{name}")
    try:
        if given and not workdir.is_dir():
            raise ValueError(f"--workdir={given}: no such folder")
        papers.show(name, workdir, flags.FLAGS.format)
    except ValueError as error:
        print(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends it, as it does any command
    flags.DEFINE_string("workdir", "", "a workdir of launch or sweep")
    flags.DEFINE_string("versus", "", "a row that the others are compared with, in pairs")
    flags.DEFINE_string("paper", "", "a paper whose published tables are shown, such as kvarn")
    formats = ["all", "markdown", "latex", "csv"]
    flags.DEFINE_enum("format", "all", formats, "of a paper's tables; all also keeps the files")
    app.run(main)
