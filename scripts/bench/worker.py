"""What both sides of decode.py share: the point to measure, and a loop that answers its driver.

A side runs in a process of its own and does one thing at a time when asked, so that two sides can
take turns on the same machine. Needs NumPy only; both environments import it.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WARM_STEPS = 4  # decoding steps before the first that counts
CHECKED = 16  # first greedy tokens of row 0, which the sides must agree on


@dataclass(frozen=True)
class Point:
    """What one process measures; `steps` are decoded `repeats` times, one after another."""

    side: str
    folder: Path
    context: int
    batch: int
    steps: int
    repeats: int
    threads: int

    @property
    def capacity(self) -> int:
        """Tokens a row may hold: the same for every side, a multiple of 256."""
        wanted = self.context + WARM_STEPS + self.steps * self.repeats + 1
        return -(-wanted // 256) * 256

    def tokens(self, vocabulary: int) -> np.ndarray:
        """The prompts, [B,context] int64: the same for every side."""
        shape = (self.batch, self.context)
        return np.random.default_rng(0).integers(0, vocabulary, shape)


@dataclass
class Side:
    """The three things a side does. `prefill` starts over; `decode` goes on from where it is."""

    load: Callable[[], None]
    prefill: Callable[[int], None]  # of so many tokens of each prompt
    decode: Callable[[int], np.ndarray]  # so many steps; their tokens [B,steps]


def parse() -> Point:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("context", "batch", "steps", "repeats", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return Point(**vars(parser.parse_args()))


def use_threads(count: int) -> None:
    """Keeps this process on so many cores; call it before JAX or PyTorch counts them."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def peak_bytes() -> int:
    """The most resident memory since the last `reset_peak`, or since the start."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Lets `peak_bytes` forget what loading took; where the system refuses, it does not forget."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used since it started."""
    ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def serve(side: Side, point: Point) -> None:
    """Answers each line of stdin, a word, with one JSON line on the real stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes elsewhere
    first: list[int] = []

    def note(tokens: np.ndarray) -> None:
        first.extend(int(token) for token in tokens[0, : CHECKED - len(first)])

    def load() -> dict:
        side.load()
        answer = {"load_peak": peak_bytes()}
        reset_peak()
        return answer

    def warm() -> dict:
        side.prefill(min(point.context, 512))
        side.decode(WARM_STEPS)
        return {}

    def prefill() -> dict:
        side.prefill(point.context)
        return {}

    def decode() -> dict:
        note(side.decode(point.steps))
        return {"first": first, "peak": peak_bytes()}

    def settle() -> dict:
        """After the last prefill: the steps that do not count."""
        note(side.decode(WARM_STEPS))
        return {}

    commands = {f.__name__: f for f in (load, warm, prefill, settle, decode)}
    for line in sys.stdin:
        start, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        answer = commands[line.strip()]()
        seconds, cpu = time.perf_counter() - start, time.process_time() - own
        # The share of the cores that others took: a number is only good where it is small.
        others = (busy_seconds() - busy - cpu) / seconds / (os.cpu_count() or 1)
        answer |= {"seconds": seconds, "cpu": cpu, "others": round(max(others, 0.0), 3)}
        print(json.dumps(answer), file=answers)
