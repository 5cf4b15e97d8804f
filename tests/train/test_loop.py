"""The loop: stages, and resuming as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.train import fit, take_apart
from kvjax.train.checkpoints import Checkpoints
from kvjax.train.metrics import Log
from tests.train import toy
from tests.train.toy import Counted, stage

ROOT = Path(__file__).parents[2]
STAGES = (stage(5, embed=False, name="first"), stage(4, name="second"))


class Killed(Exception):
    pass


class Mortal(Counted):
    """Ends the process, as it were, when it has given so many batches."""

    left = 0

    def __next__(self):
        if Mortal.left == 0:
            raise Killed
        Mortal.left -= 1
        return super().__next__()


def run(folder, batches=Counted, loss=toy.loss, save_every=2):
    frame, _ = take_apart(toy.Toy())
    return fit(frame, toy.params(), STAGES, loss, lambda _: batches(), folder,
               save_every=save_every)  # fmt: skip


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_killed_run_ends_bit_for_bit_where_the_uninterrupted_one_does(tmp_path):
    whole = run(tmp_path / "whole")
    for lived in (3, 2, 4):  # dies within the first stage, again, then within the second
        Mortal.left = lived
        with pytest.raises(Killed):
            run(tmp_path / "killed", Mortal)
    Mortal.left = 100
    again = run(tmp_path / "killed", Mortal)
    assert Mortal.left < 100
    assert whole.params.keys() == again.params.keys()
    for name, value in whole.params.items():
        np.testing.assert_array_equal(value, again.params[name], name)
    expected = lines(tmp_path / "whole")
    assert lines(tmp_path / "killed") == expected
    assert [line["step"] for line in expected] == list(range(9))
    assert [line["stage"] for line in expected] == ["first"] * 5 + ["second"] * 4
    assert {"loss", "gradient_norm", "positions", "learning_rate/adapter"} <= expected[0].keys()

    Mortal.left = 0  # a finished run is only read
    read = run(tmp_path / "whole", Mortal)
    for name in ("compile", "step", "data"):  # saving went on for a moment behind the last clock
        assert read.seconds[name] == whole.seconds[name] > 0
    np.testing.assert_array_equal(read.params["embed.kernel"], whole.params["embed.kernel"])


def test_seconds_are_those_of_all_processes(tmp_path):
    class Slow(Mortal):
        def __next__(self):
            time.sleep(0.01)
            return super().__next__()

    Mortal.left = 4
    with pytest.raises(Killed):
        run(tmp_path, Slow)
    Mortal.left = 100
    assert run(tmp_path, Slow).seconds["data"] >= 0.09  # nine steps, four of them before the kill


def test_a_checkpoint_without_a_clock_goes_on_from_zero(tmp_path, monkeypatch):
    save = Checkpoints.save

    def without(self, number, state, place):
        del place["seconds"]
        save(self, number, state, place)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", without)
        whole = run(tmp_path)
    read = run(tmp_path)
    assert read.seconds == dict.fromkeys(whole.seconds, 0.0)


def test_the_first_value_that_is_not_finite_stops_it_and_is_named(tmp_path):
    class Poisoned(Counted):
        def __next__(self):
            made = super().__next__()
            if self.at == 4:
                made.x[0, 0, 0] = np.inf
            return made

    with pytest.raises(FloatingPointError, match="stage first, step 3: the loss is not finite"):
        run(tmp_path, Poisoned, save_every=50)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]

    def infinite(model, one):
        found = toy.loss(model, one)
        return found._replace(total=found.total + jnp.sqrt(model.adapter.kernel[...][0, 0] * 0))

    with pytest.raises(FloatingPointError, match="step 0: the gradient of adapter.kernel is not"):
        run(tmp_path / "other", loss=infinite)


def test_a_log_forgets_what_is_run_again(tmp_path):
    with Log(tmp_path) as log:
        for step in range(4):
            log.write(step, {"loss": float(step), "stage": "s"})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a kill
    with Log(tmp_path, 2) as log:
        log.write(2, {"loss": 7.0})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(0, 0), (1, 1), (2, 7)]


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(tmp_path):
    def begin(name):
        command = [sys.executable, "-m", "tests.train.killed", str(tmp_path / name)]
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})

    assert begin("whole").wait() == 0
    draw, log, kills = np.random.default_rng(0), tmp_path / "killed" / "metrics.jsonl", 0
    while kills < 20:
        process, target = begin("killed"), 7 * (kills + 1)
        while process.poll() is None and written(log) < target:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))  # in a step, in a write of the log, in a checkpoint
        if process.poll() is None:
            process.kill()
            kills += 1
        assert process.wait() in (0, -signal.SIGKILL)
        if process.returncode == 0:
            break
    assert kills == 20
    assert begin("killed").wait() == 0
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    assert len(lines(tmp_path / "whole")) == 160


def written(log):
    return log.read_bytes().count(b"\n") if log.exists() else 0
