"""Damaged files load or are refused in one line: 300 of them, or KVJAX_FUZZ=20000 for the full run.

The work happens in another process, which limits its own memory and may be killed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FULL = int(os.environ.get("KVJAX_FUZZ", "3000"))


def fuzz(count: int, first: int, folder: Path) -> None:
    under_way = folder / "case"
    environment = os.environ | {"KVJAX_FUZZ_CASE": str(under_way), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.io.fuzz", str(count), str(first)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120 + count / 10,
    )  # fmt: skip
    where = under_way.read_text() if under_way.exists() else "none"
    assert done.returncode == 0, f"died in case {where}: {done.stderr[-2000:]}"
    tally = json.loads(done.stdout.splitlines()[-1])
    print(tally)
    assert not tally["failures"], "\n".join(tally["failures"][:20])
    assert tally["cases"] == count and tally["slowest"] < 2.0
    # Damage that never hits anything, or always does, would test little.
    assert tally["loaded"] > count / 20 and tally["refused"] > count / 4


def test_damaged_files(tmp_path: Path) -> None:
    fuzz(300, 0, tmp_path)


@pytest.mark.slow
def test_many_damaged_files(tmp_path: Path) -> None:
    fuzz(FULL, 300, tmp_path)
