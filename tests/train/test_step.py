"""One step: what moves and what does not, accumulation, precision, the check, one compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.train import Part, Stage, first_state, make_step, put_together, take_apart
from kvjax.train.lora import add_lora, fold
from kvjax.train.schedule import learning_rate, members
from kvjax.train.step import tensor_names
from tests.train import toy
from tests.train.toy import batch, compiled, stage, started


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def copied(state):
    return jax.tree.map(np.array, state)


def test_a_model_comes_apart_and_together():
    model = toy.Toy()
    frame, params = take_apart(model)
    assert set(params) == {"adapter.kernel", "encoder.kernel", "embed.kernel"}
    again = put_together(frame, params)
    np.testing.assert_array_equal(again.adapter.kernel[...], model.adapter.kernel[...])
    narrow = put_together(take_apart(model, "bfloat16")[0], params, "bfloat16")
    assert narrow.dtype == "bfloat16" and model.dtype == "float32"
    assert narrow.encoder.kernel[...].dtype == jnp.bfloat16


def test_the_loss_falls_and_nothing_compiles_twice():
    step, state = compiled(stage()), started(stage())
    losses = []
    for _ in range(12):
        state, report = step(state, batch(1))
        losses.append(float(report.loss))
    assert losses[-1] < losses[0] - 0.05
    assert step._cache_size() == 1
    assert report.bad == -1 and int(state.step) == 12


def test_a_batch_without_memory_leaves_its_parts_and_their_optimizers_alone():
    step, state = compiled(stage()), started(stage())
    for seed in (1, 2):
        state, _ = step(state, batch(seed))
    before = copied(state)
    state, _ = step(state, batch(3, memory=False))
    for part in ("adapter", "encoder"):
        assert equal(before.optimizer[part], state.optimizer[part])  # moments and count
        assert equal(before.params[f"{part}.kernel"], state.params[f"{part}.kernel"])
    assert not equal(before.optimizer["embed"], state.optimizer["embed"])
    assert not equal(before.params["embed.kernel"], state.params["embed.kernel"])
    mixed = jax.tree.map(lambda *x: np.concatenate(x), batch(4, memory=False), batch(5))
    state, _ = make_step(take_apart(toy.Toy())[0], stage(), toy.loss)(state, mixed)
    assert not equal(before.optimizer["encoder"], state.optimizer["encoder"])


def test_weights_move_as_adamw_moves_them():
    plan = stage()
    state, _ = compiled(plan)(started(plan), batch(1))
    before = toy.params()
    one = jax.tree.map(lambda leaf: leaf[0], batch(1))

    def mean(params):
        found = toy.loss(put_together(take_apart(toy.Toy())[0], params), one)
        return found.total / found.counted

    gradients = jax.grad(mean)(before)
    norm = np.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    for name, gradient in gradients.items():
        g = np.asarray(gradient) * min(1, 1 / norm)
        rate, decay = 1e-2 / 2, 0.0 if name.startswith("embed") else 0.1
        update = g / (np.abs(g) + 1e-8) + decay * before[name]
        np.testing.assert_allclose(state.params[name], before[name] - rate * update, atol=1e-5)


def test_many_micro_batches_equal_one_large():
    two = batch(5, micro=2)
    large = jax.tree.map(lambda leaf: leaf.reshape(1, 6, -1), two)
    plan, frame = stage(), take_apart(toy.Toy())[0]
    found = [make_step(frame, plan, toy.loss)(started(plan), each) for each in (two, large)]
    (a, left), (b, right) = found
    assert left.counted == right.counted == 30
    np.testing.assert_allclose(left.loss, right.loss, rtol=1e-6)
    np.testing.assert_allclose(left.gradient_norm, right.gradient_norm, rtol=1e-5)
    for name, value in a.params.items():
        np.testing.assert_allclose(value, b.params[name], atol=1e-6)


def test_the_norm_of_a_large_gradient_is_clipped():
    plan, frame = stage(), take_apart(toy.Toy())[0]
    huge = batch(1)._replace(y=batch(1).y * 1e6)
    state, report = make_step(frame, plan, toy.loss)(started(plan), huge)
    assert report.gradient_norm > 1e3
    moments = [m for part in state.optimizer.values() for m in part[0].mu.values()]
    norm = np.sqrt(sum(float((m**2).sum()) for m in moments)) / (1 - 0.9)
    np.testing.assert_allclose(norm, 1, rtol=1e-4)


def test_a_part_may_be_rows_alone():
    rows = Part("rows", r"embed\.", 1e-2, 0.5, rows=(1, 4), when="memory")
    plan = Stage("warm-up", 4, (Part("adapter", r"adapter\.", 1e-2, when="memory"), rows))
    step, state = compiled(plan), started(plan)
    before = copied(state)
    state, _ = step(state, batch(1))
    moved = np.abs(np.array(state.params["embed.kernel"]) - before.params["embed.kernel"]).max(1)
    assert moved.nonzero()[0].tolist() == [1, 4]
    assert equal(before.params["encoder.kernel"], state.params["encoder.kernel"])
    before = copied(state)
    state, _ = step(state, batch(2, memory=False))
    assert equal(before.params, state.params) and equal(before.optimizer, state.optimizer)


def test_masters_stay_float32_while_computing_in_bfloat16():
    after, report = compiled(stage(), "bfloat16")(started(stage()), batch(1))
    _, full = compiled(stage())(started(stage()), batch(1))
    assert {leaf.dtype for leaf in after.params.values()} == {jnp.dtype("float32")}
    assert report.loss != full.loss
    np.testing.assert_allclose(report.loss, full.loss, rtol=2e-2)


def test_the_first_tensor_that_is_not_finite_is_named():
    plan = stage()
    names, state = tensor_names(plan, toy.params()), started(plan)
    state.params["encoder.kernel"] = state.params["encoder.kernel"].at[0, 0].set(jnp.nan)
    _, report = compiled(plan)(state, batch(1))
    assert names[int(report.bad)] == "the loss"

    def sharp(whole, one):  # a finite loss whose gradient is infinite in one place
        found = toy.loss(whole, one)
        return found._replace(total=found.total + jnp.sqrt(whole.encoder.kernel[...][0, 0] * 0))

    _, report = make_step(take_apart(toy.Toy())[0], plan, sharp)(started(plan), batch(1))
    assert names[int(report.bad)] == "the gradient of encoder.kernel"


def test_learning_rates_follow_warm_up_and_cosine():
    plan, part = Stage("s", 11, (Part("p", "", 1e-3),), warmup=4), Part("p", "", 1e-3)
    rates = [float(learning_rate(plan, part, i)) for i in range(12)]
    np.testing.assert_allclose(rates[4], 1e-3, rtol=1e-6)
    np.testing.assert_allclose(rates[11], 1e-6, rtol=1e-3)
    assert rates[0] > 0 and rates[:5] == sorted(rates[:5])
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_low_rank_updates_start_at_nothing_and_train_a_frozen_matrix():
    params = toy.params()
    grown = add_lora(toy.params(), r"embed", rank=2)
    assert equal(fold(grown), params)
    plan = Stage("lora", 3, (Part("embed", r"embed\..*\.lora_", 1e-2),))
    state, step = first_state(grown, plan), compiled(plan)
    for seed in range(2):
        state, _ = step(state, batch(seed))
    assert equal(params, {name: state.params[name] for name in params})
    changed = {n for n, value in fold(state.params).items() if not equal(value, params[n])}
    assert changed == {"embed.kernel"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stage("s", 0, (Part("p", "", 1e-3),)), "stage s: 0 steps"),
        (lambda: Stage("s", 5, (Part("p", "", 1e-3),), warmup=5), "of which 5 warm up"),
        (lambda: Stage("s", 5, ()), "at least one"),
        (lambda: Part("p", "", 0.0), "part p: learning_rate 0.0"),
        (lambda: members(Stage("s", 5, (Part("p", "x", 1e-3),)), ["a"]), "matches no weight"),
        (lambda: members(Stage("s", 5, (Part("p", "a", 1e-3), Part("q", "", 1e-3))), ["a"]),
         "a is in two parts"),
        (lambda: add_lora({"a": jnp.zeros(3)}, "a", 2), "matches 0 matrices"),
    ],
)  # fmt: skip
def test_impossible_plans(make, message):
    with pytest.raises(ValueError, match=message):
        make()
