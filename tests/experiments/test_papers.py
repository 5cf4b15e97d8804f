"""Published tables as they are stored, and what stands beside them."""

import csv
import io
import subprocess
import sys
from types import SimpleNamespace

import pytest

from experiments import papers, record
from experiments.papers import Measured
from tests.experiments.conftest import ROOT
from tests.experiments.test_table import rows_of

TABLE = {
    "id": "quality", "caption": "Quality, 100 % is best", "source": "a paper", "mark": "first-hand",
    "unit": "%", "metrics": ["A", "B"], "notes": ["± is over 3 runs."],
    "rows": [
        {"model": "M-4B", "method": "FP16", "bits": "16", "values": ["61.1 ± 3.1", "80"]},
        {"model": "M-4B", "method": "New_one", "bits": "2", "values": ["60", ""],
         "mark": "inferred", "note": "by order"},
    ],
}  # fmt: skip
PUBLISHED = {"title": "A paper", "citation": "arXiv 1", "tables": [TABLE]}
OURS = Measured("quality", "M-4B", "New_one", "A", "59.0 ± 1.0 (n = 30 × 3)", "M-4B, n = 30")
SMALL = Measured("quality", "SmolLM2-135M", "New_one", "A", "7.0 (n = 16)", "SmolLM2-135M, n = 16")


def numbers(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("paper", papers.names())
def test_every_published_number_has_its_source_and_mark(paper):
    published = papers.read(paper)
    ids = [table["id"] for table in published["tables"]]
    assert len(ids) == len(set(ids)) and published["citation"]
    for number in numbers(papers.csv(published, [])):
        assert number["source"] and number["mark"] in papers.MARKS
        assert number["published"] and not number["ours"]


def test_kvarns_numbers_are_the_papers():
    found = {
        (n["table"], n["model"], n["method"], n["metric"]): n
        for n in numbers(papers.csv(papers.read("kvarn"), []))
    }
    key = ("generation", "Qwen3-4B", "KVarN", "AIME24")
    assert (found[key]["published"], found[key]["mark"]) == ("60.0 ± 1.1", "first-hand")
    llama = ("line_retrieval", "Llama-3.1-8B-Instruct", "KVarN", "600 lines")
    assert found[llama]["published"] == "89"
    again = ("eviction", "Llama-3.1-8B-Instruct", "KVarN", "400 lines")
    assert found[again]["published"] == "91"  # 95 in the other table: both are kept
    varn = ("variance_normalisation", "Phi-4-14B", "KVarN", "VarN, ms")
    assert "not certain" in found[varn]["note"]
    assert found["kivi", "Mistral-7B", "KIVI", "GSM8K"]["mark"] == "second-hand"


def test_what_was_not_measured_is_an_empty_cell():
    header, _, *rows = rows_of(papers.markdown(PUBLISHED, []))
    assert header == ["model", "method", "bits", "A, %", "B, %", "ours", "read", "note"]
    assert rows[0] == ["M-4B", "FP16", "16", "61.1 ± 3.1", "80", "", "first-hand", ""]
    assert rows[1] == ["M-4B", "New_one", "2", "60", "", "", "inferred", "by order"]


def test_ours_on_the_papers_model_stands_beside_its_metric():
    header, _, *rows = rows_of(papers.markdown(PUBLISHED, [OURS]))
    at = header.index("ours: A, %")
    assert header[at - 1] == "A, %" and "ours" not in header
    assert [row[at] for row in rows] == ["", "59.0 ± 1.0 (n = 30 × 3) (M-4B, n = 30)"]


@pytest.mark.parametrize(
    "other",
    [SMALL, OURS._replace(method="heed"), OURS._replace(metric="C")],
    ids=["model", "method", "metric"],
)
def test_anything_else_stands_under_it_with_its_scale(other):
    text = papers.markdown(PUBLISHED, [other])
    _, table, ours = text.split("**Quality", 1)[0], *text.split("*Ours, at another scale:*")
    assert "ours: " not in table and other.text not in table
    assert ours.startswith(f" {other.scale}\n")
    header, _, row = rows_of(ours)
    assert header == ["model", "method", other.metric]
    assert row == [other.model, other.method, other.text]


def test_scales_do_not_share_a_table():
    larger = SMALL._replace(scale="SmolLM2-135M, n = 64", text="8.0 (n = 64)")
    assert papers.markdown(PUBLISHED, [SMALL, larger]).count("*Ours, at another scale:*") == 2


def test_the_csv_has_a_line_a_number():
    found = numbers(papers.csv(PUBLISHED, [OURS, SMALL]))
    assert [(n["method"], n["metric"], n["published"], n["ours"]) for n in found] == [
        ("FP16", "A", "61.1 ± 3.1", ""),
        ("FP16", "B", "80", ""),
        ("New_one", "A", "60", OURS.text),
        ("New_one", "A", "", SMALL.text),
    ]
    assert found[2]["scale"] == OURS.scale and found[3]["scale"] == SMALL.scale
    assert found[2]["mark"] == "inferred" and found[3]["mark"] == ""  # ours was not read anywhere


def test_latex_is_plain_ascii_and_escaped():
    text = papers.latex(PUBLISHED, [SMALL])
    assert text.isascii() and text.count(r"\toprule") == 2
    assert r"New\_one" in text and r"A, \%" in text and r"61.1 $\pm$ 3.1" in text
    assert r"100 \% is best" in text and r"ours, at another scale: SmolLM2-135M, n = 16" in text


def test_all_of_kvarn_is_plain_latex():
    assert papers.latex(papers.read("kvarn"), []).isascii()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"mark": "heard"}, "mark 'heard'; use"),
     ({"rows": [TABLE["rows"][0] | {"values": ["1"]}]}, "FP16 has 1 values, not 2"),
     ({"rows": [TABLE["rows"][0]] * 2}, "M-4B FP16 stands twice")],
)  # fmt: skip
def test_damaged_tables_are_refused(change, message):
    with pytest.raises(ValueError, match=f"table 'quality': {message}"):
        papers.check(TABLE | change)


@pytest.fixture
def another(tmp_path, monkeypatch):
    """A second paper, and a workdir with one of its results, two folders down."""
    here = tmp_path / "experiments"
    (here / "other").mkdir(parents=True)
    record.write_json(here / "other" / "published.json", PUBLISHED)
    monkeypatch.setattr(papers, "HERE", here)
    for experiment in ("other", "head_to_head"):
        folder = tmp_path / "results" / "small" / "points" / experiment
        folder.mkdir(parents=True)
        record.write_json(folder / "config.json", {"experiment": experiment})
        record.write_json(folder / "environment.json", {})
        record.write_json(folder / "result.json", {"value": "7.0 (n = 16)"})
    return tmp_path / "results"


def report(table: str = "quality") -> SimpleNamespace:
    def measured(results):
        return [SMALL._replace(table=table, text=each.result["value"]) for each in results]

    return SimpleNamespace(measured=measured)


def test_another_paper_needs_no_line_here(another, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "experiments.other.report", report())
    papers.show("other", another)
    printed = capsys.readouterr().out
    for name in ("paper.md", "paper.tex", "paper.csv"):
        kept = (another / name).read_text("utf-8")
        assert kept in printed and kept.count("7.0 (n = 16)") == 1  # the other study's is not ours


def test_one_format_is_printed_and_not_kept(another, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "experiments.other.report", SimpleNamespace())
    papers.show("other", another, "csv")
    assert capsys.readouterr().out.startswith("table,model,method,")
    assert not (another / "paper.csv").exists()


def test_numbers_for_no_table_are_refused(another, monkeypatch):
    monkeypatch.setitem(sys.modules, "experiments.other.report", report("qualty"))
    with pytest.raises(ValueError, match="other has no table 'qualty'; it has quality"):
        papers.show("other", another)


def test_the_command(tmp_path):
    def run(*words):
        command = [sys.executable, "-m", "experiments.table", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    shown = run("--paper=kvarn", f"--workdir={tmp_path}")
    assert shown.returncode == 0 and "60.0 ± 1.1" in shown.stdout and r"\toprule" in shown.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "paper.csv", "paper.md", "paper.tex"
    ]  # fmt: skip
    wrong = run("--paper=kvarm")
    assert wrong.returncode == 2
    assert wrong.stdout == f"error: --paper=kvarm: unknown; choose one of {_all()}\n"
    assert "--workdir=none: no such folder" in run("--paper=kvarn", "--workdir=none").stdout


def _all() -> str:
    return ", ".join(papers.names())
