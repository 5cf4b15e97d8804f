"""The compressor's four stages, as launched by a person, killed twenty times on the way."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.experiments.conftest import ROOT

STEPS = 50  # of each stage
KILLS = 20


def launch(workdir, cache):
    stages = [f"--config.stages.{name}.steps={STEPS}"
              for name in ("adapter", "encoder", "end_to_end", "sft")]  # fmt: skip
    command = [sys.executable, "-m", "experiments.launch", "--config=configs/lclm.py:smoke",
               f"--workdir={workdir}", "--config.save_every=5", *stages]  # fmt: skip
    own = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache),
           "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
    with (workdir / "out.txt").open("a") as out:
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=out, stderr=out)


def losses(workdir):
    path = workdir / "points/mixed/metrics.jsonl"
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return [(line["step"], line["stage"], line["loss"]) for line in found]


@pytest.mark.slow
def test_twenty_kills_leave_the_losses_as_they_were(tmp_path):
    """SIGKILL at a random moment after some progress, wherever the process is by then."""
    whole, killed, cache = (tmp_path / name for name in ("whole", "killed", "cache"))
    for folder in (whole, killed):
        folder.mkdir()
    assert launch(whole, cache).wait() == 0, (whole / "out.txt").read_text()
    expected, draw, at = losses(whole), np.random.default_rng(0), []
    assert len(expected) == 4 * STEPS
    for number in range(KILLS):
        target = (number + 1) * len(expected) // (KILLS + 2)
        process = launch(killed, cache)
        while process.poll() is None and len(losses(killed)) < target:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        assert process.poll() is None, (killed / "out.txt").read_text()
        process.kill()
        process.wait()
        at.append(len(losses(killed)))
    assert len(set(at)) > KILLS / 2  # at different places
    assert launch(killed, cache).wait() == 0, (killed / "out.txt").read_text()
    assert losses(killed) == expected
    results = [json.loads((f / "points/mixed/result.json").read_text()) for f in (whole, killed)]
    assert results[0]["quality"] == results[1]["quality"]
