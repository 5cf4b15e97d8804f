"""What a run leaves behind: its config, where it ran, its metrics, and its result, written last."""

import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

_PACKAGES = ("kvjax", "jax", "jaxlib", "flax", "numpy", "ml-collections", "tokenizers")


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that `path` is there whole or not at all, whenever the process ends."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    scratch = path.with_name(path.name + ".part")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def read_json(path: Path) -> Any:
    """Parsed JSON; `ValueError` naming the file when it is damaged."""
    try:
        return json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: not JSON ({error}); delete the folder to run it again"
        ) from error


@cache
def environment() -> dict[str, Any]:
    """Commit, command, versions and machine of this process.

    Found once: the code that runs is what was there at the start, whatever is committed meanwhile.
    """
    return {
        "commit": _commit(),
        "command": command(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


def command() -> str:
    """The command line as a person would type it again."""
    program = Path(sys.argv[0])
    module = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None)
    start = ["python", "-m", module] if module else ["python", str(program)]
    return shlex.join([*start, *sys.argv[1:]])


def _commit() -> str | None:
    """The commit of the code, with `+changes` when the tree differs from it; None without git."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    except OSError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Metrics:
    """Scalars of a run, as lines of `metrics.jsonl` and as TensorBoard events.

    Opening it removes what an unfinished run left in the folder. A value that is not finite stops
    the run: `FloatingPointError` names it.
    """

    def __init__(self, folder: Path):
        events = folder / "tensorboard"
        shutil.rmtree(events, ignore_errors=True)
        self._file = (folder / "metrics.jsonl").open("w", encoding="utf-8")
        self._events = SummaryWriter(logdir=str(events), write_to_disk=True)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value} at step {step}")
            self._events.add_scalar(name, value, step)
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._events.close()
