"""A paper's published tables, and beside them what we measured.

    python -m experiments.table --paper=kvarn [--workdir=results/kvarn] [--format=markdown]

Published numbers are data: `experiments/<paper>/published.json`, each table with its source and
with how it was read (`MARKS`; a row may have its own). They stand as printed and nothing is added
to them. A study puts its own numbers beside them with `measured(results) -> list[Measured]` in its
`report` module. What was measured on the paper's own model stands in the paper's table, in a column
"ours"; anything else in a table of its own under it, headed by its scale.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from experiments import record
from experiments.table import Result, load

MARKS = {
    "first-hand": "read in the paper's own text",
    "code": "read in the authors' code",
    "figure": "read off a figure or a README",
    "second-hand": "as others report it; not checked against the source",
    "inferred": "deduced, not stated by the source",
}
HERE = Path(__file__).parent


class Measured(NamedTuple):
    """One number of ours: where it belongs, as text, and what it is about.

    `table` is an id in published.json. `metric` may be one that the paper lacks, on another model.
    `text` says n; `scale` is one line (model, data, n), equal where numbers may be compared.
    """

    table: str
    model: str
    method: str
    metric: str
    text: str
    scale: str


def names() -> list[str]:
    """The papers whose published numbers are here."""
    return sorted(path.parent.name for path in HERE.glob("*/published.json"))


def read(paper: str) -> dict[str, Any]:
    """The published tables of a paper; `ValueError` lists the papers there are."""
    if paper not in names():
        raise ValueError(f"--paper={paper}: unknown; choose one of {', '.join(names())}")
    published = record.read_json(HERE / paper / "published.json")
    for table in published["tables"]:
        check(table)
    return published


def check(table: dict[str, Any]) -> None:
    """`ValueError` for a number without its mark or its metric, or with two values."""
    where, seen = f"table {table['id']!r}", set()
    for row in table["rows"]:
        if row.get("mark", table["mark"]) not in MARKS:
            raise ValueError(f"{where}: mark {row.get('mark', table['mark'])!r}; use {list(MARKS)}")
        if len(row["values"]) != len(table["metrics"]):
            raise ValueError(f"{where}: {row['method']} has {len(row['values'])} values, not "
                             f"{len(table['metrics'])}")  # fmt: skip
        key = (row["model"], row["method"], row["bits"], *row["values"])
        if key in seen:
            raise ValueError(f"{where}: {row['model']} {row['method']} stands twice")
        seen.add(key)


def finished(paper: str, workdir: Path) -> list[Result]:
    """Every finished point of the paper's study under `workdir`, at any depth."""
    folders = sorted({path.parent for path in workdir.rglob("points") if path.is_dir()})
    results = [result for folder in folders for result in load(folder)]
    return [result for result in results if result.config["experiment"] == paper]


def measurements(paper: str, results: Sequence[Result]) -> list[Measured]:
    """What the study makes of its results; nothing where it has no `measured`."""
    if not results:
        return []
    report = importlib.import_module(f"experiments.{paper}.report")
    return list(report.measured(results)) if hasattr(report, "measured") else []


def beside(table: dict[str, Any], measured: Sequence[Measured]) -> pd.DataFrame:
    """The published table as text; the column "ours" follows the metric it belongs to."""
    ours = _on_its_models(table, measured)
    unit = f", {table['unit']}" if table["unit"] else ""
    rows = []
    for row in table["rows"]:
        cells = {"model": row["model"], "method": row["method"], "bits": row["bits"]}
        for metric, value in zip(table["metrics"], row["values"], strict=True):
            cells[metric + unit] = value
            if any(key[2] == metric for key in ours):
                found = ours.get((row["model"], row["method"], metric))
                cells[f"ours: {metric}{unit}"] = f"{found.text} ({found.scale})" if found else ""
        if not ours:
            cells["ours"] = ""
        rows.append(cells | {"read": row.get("mark", table["mark"]), "note": row.get("note", "")})
    whole = pd.DataFrame(rows)
    return whole.drop(columns=[c for c in ("model", "bits", "note") if not whole[c].any()])


def elsewhere(
    table: dict[str, Any], measured: Sequence[Measured]
) -> Iterator[tuple[str, pd.DataFrame]]:
    """What was measured on other models or by other metrics, by scale: (scale, its table)."""
    inside = set(_on_its_models(table, measured).values())
    scales: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    for each in measured:
        if each.table == table["id"] and each not in inside:
            rows = scales.setdefault(each.scale, {})
            cells = rows.setdefault((each.model, each.method), {})
            cells[each.metric] = each.text
    for scale, rows in scales.items():
        found = [{"model": key[0], "method": key[1], **cells} for key, cells in rows.items()]
        yield scale, pd.DataFrame(found).fillna("")


def _on_its_models(
    table: dict[str, Any], measured: Sequence[Measured]
) -> dict[tuple[str, str, str], Measured]:
    """By (model, method, metric): what has a place in the published table."""
    places = {(row["model"], row["method"]) for row in table["rows"] if row["model"]}
    return {
        (each.model, each.method, each.metric): each
        for each in measured
        if each.table == table["id"]
        and (each.model, each.method) in places
        and each.metric in table["metrics"]
    }


def markdown(published: dict[str, Any], measured: Sequence[Measured]) -> str:
    """All tables, each with its source, its notes, and our own numbers under it."""
    marks = "; ".join(f"{mark}: {meaning}" for mark, meaning in MARKS.items())
    parts = [f"# {published['title']}, as published, and ours", f"{published['citation']}."]
    parts.append(f"How a number was read: {marks}. An empty cell of ours was not measured.")
    for table in published["tables"]:
        parts.append(f"**{table['caption']}** ({table['source']})")
        parts.append(beside(table, measured).to_markdown(index=False, disable_numparse=True))
        parts += ["\n".join(f"- {note}" for note in table["notes"])] * bool(table["notes"])
        for scale, frame in elsewhere(table, measured):
            parts.append(f"*Ours, at another scale:* {scale}")
            parts.append(frame.to_markdown(index=False, disable_numparse=True))
    return "\n\n".join(parts) + "\n"


def latex(published: dict[str, Any], measured: Sequence[Measured]) -> str:
    """All tables in LaTeX (booktabs); sources and notes stand in the captions."""
    parts = []
    for table in published["tables"]:
        caption = " ".join([f"{table['caption']} ({table['source']}).", *table["notes"]])
        parts.append(_latex_table(beside(table, measured), caption))
        for scale, frame in elsewhere(table, measured):
            caption = f"{table['caption']}: ours, at another scale: {scale}"
            parts.append(_latex_table(frame, caption))
    return "\n".join(parts)


def _latex_table(frame: pd.DataFrame, caption: str) -> str:
    style = frame.map(tex).rename(columns=tex).style.hide(axis="index")
    return style.to_latex(caption=tex(caption), hrules=True)


_TEX = {sign: "\\" + sign for sign in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"$\sim$", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$",
    "|": "$|$", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--", "µ": r"$\mu$",
    "²": "$^2$", "‖": r"$\|$", "≤": r"$\leq$", "≥": r"$\geq$",
}  # fmt: skip


def tex(text: str) -> str:
    """Plain text as LaTeX that any engine sets."""
    return "".join(_TEX.get(sign, sign) for sign in text)


_COLUMNS = ("table", "model", "method", "bits", "metric", "unit", "published", "ours", "scale",
            "mark", "source", "note", "caption")  # fmt: skip


def csv(published: dict[str, Any], measured: Sequence[Measured]) -> str:
    """One line for each number, published or ours, with its source."""
    rows: list[dict[str, str]] = []
    for table in published["tables"]:
        ours = _on_its_models(table, measured)
        about = {key: table[key] for key in ("caption", "unit", "source")}
        for row in table["rows"]:
            place = {key: row[key] for key in ("model", "method", "bits")}
            read = {"mark": row.get("mark", table["mark"]), "note": row.get("note", "")}
            for metric, value in zip(table["metrics"], row["values"], strict=True):
                found = ours.get((row["model"], row["method"], metric))
                mine = {"ours": found.text, "scale": found.scale} if found else {}
                number = {"metric": metric, "published": value}
                if value or found:
                    rows.append({"table": table["id"], **place, **number, **mine, **read, **about})
        for each in measured:
            if each.table == table["id"] and each not in ours.values():
                place = {"model": each.model, "method": each.method, "metric": each.metric}
                mine = {"ours": each.text, "scale": each.scale}
                rows.append({"table": table["id"], **place, **mine})
    blank = dict.fromkeys(_COLUMNS, "")
    return pd.DataFrame([blank | row for row in rows]).to_csv(index=False)


FORMATS: dict[str, tuple[str, Callable[[dict[str, Any], Sequence[Measured]], str]]] = {
    "markdown": ("paper.md", markdown),
    "latex": ("paper.tex", latex),
    "csv": ("paper.csv", csv),
}


def show(paper: str, workdir: Path, chosen: str = "all") -> None:
    """Prints one format, or all three and keeps those in `workdir` where that is a folder.

    Raises:
      ValueError: for a paper that is not here, or numbers for a table that it does not have.
    """
    published = read(paper)
    measured = measurements(paper, finished(paper, workdir))
    tables = [table["id"] for table in published["tables"]]
    for each in measured:
        if each.table not in tables:
            raise ValueError(f"{paper} has no table {each.table!r}; it has {', '.join(tables)}")
    texts = {file: render(published, measured) for form, (file, render) in FORMATS.items()
             if chosen in ("all", form)}  # fmt: skip
    for file, text in texts.items():
        if chosen == "all" and workdir.is_dir():
            (workdir / file).write_text(text, "utf-8")
    print("\n".join(texts.values()))  # last, for a pipe that closes early ends it
