"""The loop: stages, and resuming as if nothing had happened."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.train import fit, take_apart
from tests.train.conftest import Counted, loss, model, stage

STAGES = (stage(5, decoder=False), stage(4))


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


def run(folder, batches=Counted, **changes):
    frame, params = take_apart(model())
    params = jax.tree.map(jnp.copy, params)
    return fit(frame, params, STAGES, loss, lambda _: batches(), folder, save_every=2, **changes)


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
    assert whole.params.keys() == again.params.keys()
    for name, value in whole.params.items():
        np.testing.assert_array_equal(value, again.params[name], name)
    expected = lines(tmp_path / "whole")
    assert lines(tmp_path / "killed") == expected
    assert [line["step"] for line in expected] == list(range(9))
    assert {"loss", "gradient_norm", "positions", "learning_rate/adapter"} <= expected[0].keys()


def test_a_finished_run_is_only_read(tmp_path):
    whole = run(tmp_path)
    Mortal.left = 0
    again = run(tmp_path, Mortal)
    for name, value in whole.params.items():
        np.testing.assert_array_equal(value, again.params[name], name)


def test_the_first_value_that_is_not_finite_stops_it_and_is_named(tmp_path):
    calls = Counted()

    def later(whole, one):
        found = loss(whole, one)
        broken = (one.tokens == 7).any() & (found.total < 0)
        return found._replace(total=jnp.where(broken | (one.labels > 10**6).any(), jnp.nan,
                                              found.total))  # fmt: skip

    class Poisoned(Counted):
        def __next__(self):
            made = super().__next__()
            if self.at == 4:
                made.labels[0, 0, 0] = 10**6 + 1
            return made

    frame, params = take_apart(model())
    params = jax.tree.map(jnp.copy, params)
    with pytest.raises(FloatingPointError, match="stage all, step 3: the loss is not finite"):
        fit(frame, params, STAGES, later, lambda _: Poisoned(), tmp_path, save_every=50)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert calls.at == 0
