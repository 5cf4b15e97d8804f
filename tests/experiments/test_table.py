"""Tables and pictures from result folders alone, made here by hand."""

import csv
import os
import subprocess
import sys

import pytest

from experiments import plot, record, table

SCALE = {
    "model": "m", "parameters": 135e6, "dtype": "float32", "texts": ["a", "b"],
    "tokens_sha256": "0123456789", "length": 8, "block": 2, "positions": 16, "regime": "decoding",
}  # fmt: skip


def interval(mean: float) -> dict:
    return {"mean": mean, "low": mean / 2, "high": mean * 2}


def result(name: str, kl: float, size: int, **scale) -> dict:
    return {
        "name": name,
        "scale": SCALE | scale,
        "quality": {
            "perplexity": 10.0 + kl, "kl": interval(kl), "nll_increase": interval(kl),
            "agreement": interval(0.9), "kl_by_quarter": [kl, kl, 2 * kl, 2 * kl],
        },
        "size": {"bytes": size, "ratio": 64e6 / size, "bits_per_element": 32 * size / 64e6},
        "speed": {"tokens_per_second": 20.0, "ratio": 0.5, "tokens": 64, "repeats": 2},
        "blocks": {"kl": [[kl, kl], [kl, 2 * kl]], "nll": [[1.0, 2.0], [3.0, 4.0 + kl]]},
    }  # fmt: skip


def add(workdir, name: str, kl: float, size: int, finished: bool = True, **scale) -> None:
    folder = workdir / "points" / name
    folder.mkdir(parents=True)
    record.write_json(folder / "config.json", {"experiment": "head_to_head", "row": name})
    origin = {"commit": "0123456789abcdef+changes", "command": f"python -m launch --{name}"}
    record.write_json(folder / "environment.json", origin)
    if finished:
        record.write_json(folder / "result.json", result(name, kl, size, **scale))


@pytest.fixture
def workdir(tmp_path):
    add(tmp_path, "rtn-2", 0.3, 8_000_000)
    add(tmp_path, "exact", 0.0, 64_000_000)
    add(tmp_path, "kvarn-k2v2", 0.1, 8_000_000)
    return tmp_path


def rows_of(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_has_its_numbers_scale_and_origin(workdir):
    table.write(table.load(workdir), workdir)
    text = (workdir / "result.md").read_text()
    header, _, *rows = rows_of(text)
    assert [row[0] for row in rows] == ["exact", "kvarn-k2v2", "rtn-2"]  # by bytes, then quality
    assert "KL, nats (n = 16)" in header and "tokens/s (n = 2 × 64)" in header
    assert rows[1][header.index("KL, nats (n = 16)")] == "0.1000 [0.0500, 0.2000]"
    assert rows[1][header.index("× smaller")] == "8.00"
    assert all(row[-1] == "012345678+changes" for row in rows)
    assert "m (135M parameters, float32), 2 texts × 8 tokens (n = 16), decoding" in text
    assert "    python -m launch --rtn-2" in text


def test_the_csv_holds_every_number_with_config_commit_and_command(workdir):
    table.write(table.load(workdir), workdir)
    with (workdir / "result.csv").open() as file:
        rows = list(csv.DictReader(file))
    row = next(row for row in rows if row["name"] == "rtn-2")
    assert float(row["quality.kl.mean"]) == 0.3
    assert row["commit"] == "0123456789abcdef+changes"
    assert row["command"] == "python -m launch --rtn-2"
    assert '"row": "rtn-2"' in row["config"]


def test_latex_escapes_and_has_every_row(workdir):
    table.write(table.load(workdir), workdir)
    text = (workdir / "result.tex").read_text()
    assert text.count(r"\\") == 4 and r"same top token, \%" in text and r"\toprule" in text


def test_unfinished_points_are_named_and_nothing_is_filled_in(workdir):
    add(workdir, "int8", 0.0, 0, finished=False)
    table.write(table.load(workdir), workdir)
    text = (workdir / "result.md").read_text()
    assert "No result: int8." in text
    assert "int8" not in [row[0] for row in rows_of(text)]


def test_numbers_of_different_scales_never_share_a_table(workdir):
    add(workdir, "long", 0.2, 16_000_000, length=4096)
    text = table.markdown(table.load(workdir), [])
    assert text.count("| cache ") == 2 and "2 texts × 4,096 tokens" in text
    assert len(plot.write(table.load(workdir), workdir)) == 4


def test_versus_gives_paired_differences(workdir):
    header, _, *rows = rows_of(table.markdown(table.load(workdir), [], versus="rtn-2"))
    kl = header.index("KL − rtn-2's")
    assert rows[1][kl].startswith("-0.2500 [")  # of block means: 0.1·(1, 1, 1, 2) − 0.3·(…)
    assert rows[2][kl] == "0.0000 [0.0000, 0.0000]"


def test_the_picture_names_every_row(workdir):
    paths = plot.write(table.load(workdir), workdir)
    assert [path.name for path in paths] == ["result.png", "result.svg"]
    assert (workdir / "result.png").read_bytes().startswith(b"\x89PNG")
    drawn = plot.draw(*next(iter(table.by_scale(table.load(workdir)))))
    words = [text.get_text() for axes in drawn.axes for text in axes.texts]
    assert {"rtn-2", "kvarn-k2v2"} <= set(words) and any("exact" in word for word in words)


def test_the_command_works_from_results_alone(workdir):
    command = [sys.executable, "-m", "experiments.table", f"--workdir={workdir}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "kvarn-k2v2" in done.stdout
    read, write = os.pipe()
    os.close(read)  # as by a `head` that has seen enough
    cut = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert cut.stderr == b"" and (workdir / "result.md").exists()
    wrong = subprocess.run([*command, "--versus=none"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "choose one of exact, kvarn-k2v2, rtn-2" in wrong.stdout
