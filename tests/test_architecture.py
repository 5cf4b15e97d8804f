"""The shape of the house: which folder may import which, how long things may be, what no file says.

Every rule is a function from source text to a list of faults, so each is tried on bad text too.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each folder of kvjax may import besides itself. Arrows point one way: a new folder gets its
# line here, and a line that would close a circle fails below.
LAYERS: dict[str, set[str]] = {"ops": set()}
for choice in ("select", "encode", "place"):
    LAYERS[choice] = {"ops"}
LAYERS["cache"] = {"select", "encode", "place", "ops"}
for content in ("models", "soft", "memory"):
    LAYERS[content] = {"cache"} | LAYERS["cache"]
LAYERS["io"] = {"models"}
LAYERS["soft"] |= {"models", "io"}  # an encoder is a stack of the decoder's own layers
for top in ("train", "data"):
    LAYERS[top] = {"models", "soft", "memory", "io"} | LAYERS["models"]

NEVER = {"torch", "tensorflow", "experiments", "configs", "scripts", "tests"}  # inside kvjax
FILE_LINES, FUNCTION_LINES = 400, 150


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def is_kernel(path: Path) -> bool:
    return path.parent.parent.name == "ops" and path.name in ("tpu.py", "gpu.py")


def imported(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names that a module of `package` imports anywhere in it, relative ones resolved.

    `from a import b` gives "a.b": b may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else ()
            base = [*up, *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def import_faults(source: str, parts: tuple[str, ...]) -> list[str]:
    """Imports that the file at `parts`, ("kvjax", "cache", "merge.py"), must not make."""
    faults = []
    folder = parts[1] if len(parts) > 2 else None  # None: kvjax/__init__.py, which gathers all
    for name in imported(source, parts[:-1]):
        first, _, rest = name.partition(".")
        if first in NEVER:
            faults.append(f"{'/'.join(parts)} imports {name}")
        if first != "kvjax" or folder is None:
            continue
        target = rest.partition(".")[0]
        if target not in LAYERS:
            faults.append(f"{'/'.join(parts)} imports {name}: name the folder that has it")
        elif target != folder and target not in LAYERS.get(folder, set()):
            faults.append(f"{'/'.join(parts)} imports {name}: {folder} may not import {target}")
    return faults


def length_faults(source: str, where: str) -> list[str]:
    faults = []
    lines = source.count("\n")
    if lines > FILE_LINES:
        faults.append(f"{where} has {lines} lines, over {FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                faults.append(f"{where}: {node.name} has {length} lines, over {FUNCTION_LINES}")
    return faults


def pattern(*pieces: str) -> str:
    """Joins what must not stand in one piece in this file either."""
    return "".join(pieces)


FORBIDDEN = re.compile(
    "|".join(
        [
            pattern(r"py", r"pi\.org"),
            pattern(r"python", r"hosted\.org"),
            pattern(r"registry\.", r"npm", r"js\.org"),
            pattern(r"deb\.", r"debian\.org"),
            pattern(r"(?:extra-)?", r"index-", r"url"),
            pattern(r"\.\./", r"shared"),
            pattern(r"(?<![\w-])shared", r"/(?:golden|specs|tools|hooks|\w+(?:-\w+)*\.md)"),
            pattern(r"\.", r"library\b/?"),
            pattern(r"/", r"work/(?!flows)"),
        ]
    ),
    re.IGNORECASE,
)


def word_faults(text: str, where: str) -> list[str]:
    return [
        f"{where}:{text.count(chr(10), 0, found.start()) + 1}: {found.group()!r}"
        for found in FORBIDDEN.finditer(text)
    ]


def committed_files() -> list[Path]:
    """What git tracks, and what it would track after `git add .`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_imports_point_one_way() -> None:
    files = python_files("kvjax")
    assert files
    faults = [
        fault
        for path in files
        for fault in import_faults(path.read_text(), path.relative_to(ROOT).parts)
    ]
    assert not faults, "\n".join(faults)


def test_every_folder_of_kvjax_has_its_place() -> None:
    folders = {path.relative_to(ROOT).parts[1] for path in (ROOT / "kvjax").rglob("*/*.py")}
    assert folders <= LAYERS.keys(), f"give {folders - LAYERS.keys()} a line in LAYERS"


def test_the_layers_have_no_circle() -> None:
    left = {name: set(allowed) for name, allowed in LAYERS.items()}
    while free := [name for name, allowed in left.items() if not allowed & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_no_file_or_function_is_too_long() -> None:
    faults = [
        fault
        for path in python_files("kvjax", "experiments")
        if not is_kernel(path)
        for fault in length_faults(path.read_text(), str(path.relative_to(ROOT)))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("folder", ["kvjax", "experiments"])
def test_every_package_folder_has_an_init(folder: str) -> None:
    bare = {path.parent for path in python_files(folder)} - {
        path.parent for path in python_files(folder) if path.name == "__init__.py"
    }
    assert not bare


def test_no_committed_file_names_what_lies_outside() -> None:
    faults = []
    for path in committed_files():
        content = path.read_bytes()
        if b"\0" not in content:
            faults += word_faults(content.decode(errors="replace"), str(path.relative_to(ROOT)))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import torch", ("kvjax", "io", "load.py")),
        ("from experiments.launch import main", ("kvjax", "train", "step.py")),
        ("def f():\n    from kvjax.models import decoder", ("kvjax", "cache", "merge.py")),
        ("from kvjax import cache", ("kvjax", "encode", "base.py")),
        ("from ..cache import merge", ("kvjax", "ops", "decode.py")),
        ("from ...cache.merge import merge", ("kvjax", "ops", "decode", "api.py")),
        ("import kvjax", ("kvjax", "models", "decoder.py")),
        ("import kvjax.io.gguf", ("kvjax", "models", "decoder.py")),
    ],
)
def test_a_wrong_import_is_found(source: str, parts: tuple[str, ...]) -> None:
    assert len(import_faults(source, parts)) == 1


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("from kvjax.cache import merge", ("kvjax", "models", "decoder.py")),
        ("from .merge import merge", ("kvjax", "cache", "append.py")),
        ("from . import merge", ("kvjax", "cache", "append.py")),
        ("import jax.numpy as jnp", ("kvjax", "ops", "x", "reference.py")),
        ("from kvjax.models.config import DecoderConfig", ("kvjax", "io", "load.py")),
        ("from .io import load", ("kvjax", "__init__.py")),
    ],
)
def test_a_right_import_passes(source: str, parts: tuple[str, ...]) -> None:
    assert not import_faults(source, parts)


def test_a_long_file_and_a_long_function_are_found() -> None:
    function = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
    assert len(length_faults(function, "a.py")) == 1
    assert len(length_faults("x = 1\n" * (FILE_LINES + 1), "a.py")) == 1
    assert not length_faults("x = 1\n" * FILE_LINES, "a.py")


@pytest.mark.parametrize(
    "text",
    [
        pattern("https://py", "pi.org/simple"),
        pattern("see ../sha", "red/x"),
        pattern("see shared", "/design.md"),
        pattern("grep x /", "work/main"),
        pattern("ls .", "library/env"),
    ],
)
def test_a_forbidden_word_is_found(text: str) -> None:
    assert word_faults("fine\n" + text, "a.md")[0].startswith("a.md:2:")


def test_plain_words_pass() -> None:
    assert not word_faults("cache.shared / shared/routed, framework/x, a library, workdir/", "a")
