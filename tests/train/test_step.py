"""One step: what moves and what does not, accumulation, precision, the check, one compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.train import Part, Stage, first_state, make_step, put_together, take_apart
from kvjax.train.lora import add_lora, fold
from kvjax.train.schedule import learning_rate, members
from kvjax.train.step import tensor_names
from tests.train.conftest import batch, compiled, loss, model, plain, stage, started


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def copied(state):
    return jax.tree.map(np.array, state)


def of(params, prefix):
    return {name: value for name, value in params.items() if name.startswith(prefix)}


def test_a_model_comes_apart_and_together():
    whole = model()
    frame, params = take_apart(whole)
    assert "decoder.layers.0.mlp.up_proj.kernel" in params and "adapter.fc1.bias" in params
    again = put_together(frame, params)
    for name, value in take_apart(again)[1].items():
        np.testing.assert_array_equal(value, params[name])
    assert put_together(take_apart(whole, "bfloat16")[0], params, "bfloat16").encoder.dtype == (
        "bfloat16"
    )
    assert whole.encoder.dtype == "float32"


def test_the_loss_falls_and_nothing_compiles_twice():
    step, state = compiled(stage()), started(stage())
    losses = []
    for _ in range(12):
        state, report = step(state, batch(1))
        losses.append(float(report.loss))
    assert losses[-1] < losses[0] - 0.3
    assert step._cache_size() == 1
    assert report.bad == -1 and int(state.step) == 12


def test_a_batch_without_regions_leaves_encoder_and_adapter_and_their_optimizers_alone():
    step, state = compiled(stage()), started(stage())
    for seed in (1, 2):
        state, _ = step(state, batch(seed))
    before = copied(state)
    state, _ = step(state, batch(3, regions=False))
    for part in ("adapter", "encoder"):
        assert equal(before.optimizer[part], state.optimizer[part])  # moments and count
        assert equal(of(before.params, part), of(state.params, part))
    assert not equal(before.optimizer["decoder"], state.optimizer["decoder"])
    assert not equal(of(before.params, "decoder"), of(state.params, "decoder"))
    state, _ = step(state, batch(4))
    assert not equal(before.optimizer["encoder"], state.optimizer["encoder"])


def test_regions_in_one_micro_batch_move_the_encoder():
    step, state = compiled(stage()), started(stage())
    before = copied(state)
    both = jax.tree.map(lambda *x: np.concatenate(x), batch(1, regions=False), batch(2))
    state, _ = step(state, both)
    assert not equal(before.optimizer["encoder"], state.optimizer["encoder"])


def test_many_micro_batches_equal_one_large():
    two = batch(5, micro=2)
    _, report = compiled(stage())(started(stage()), two)
    params = take_apart(model())[1]
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], two) for i in (0, 1)]
    found = [jax.value_and_grad(lambda p, x: plain(p, x).total)(params, part) for part in parts]
    count = sum(int((part.labels[:, 1:] != -100).sum()) for part in parts)
    assert report.count == count
    np.testing.assert_allclose(report.loss, sum(total for total, _ in found) / count, rtol=1e-6)
    summed = [sum(gradient[name] for _, gradient in found) / count for name in params]
    norm = np.sqrt(sum(float((g**2).sum()) for g in summed))
    np.testing.assert_allclose(report.gradient_norm, norm, rtol=1e-4)


def test_the_warm_up_trains_the_adapter_and_three_rows_of_the_embedding():
    rows = Part("rows", r"decoder\.embed_tokens", 1e-2, rows=(29, 30, 31), when="memory")
    plan = Stage("warm-up", 4, (Part("adapter", r"adapter\.", 1e-2, when="memory"), rows))
    step, state = compiled(plan), started(plan)
    before = copied(state)
    state, _ = step(state, batch(1))
    name = "decoder.embed_tokens.weight"
    moved = np.abs(np.array(state.params[name]) - before.params[name]).max(1) > 0
    assert moved.nonzero()[0].tolist() == [29, 30, 31]
    for same in ("encoder.", "decoder.layers", "decoder.norm"):
        assert equal(of(before.params, same), of(state.params, same))
    assert not equal(of(before.params, "adapter"), of(state.params, "adapter"))


def test_masters_stay_float32_while_computing_in_bfloat16():
    seen = []

    def spying(whole, one):
        seen.append(whole.decoder.embed_tokens.weight[...].dtype)
        return loss(whole, one)

    frame, _ = take_apart(model(), "bfloat16")
    step = make_step(frame, stage(), spying, "bfloat16")
    after, report = step(started(stage()), batch(1))
    _, full = compiled(stage())(started(stage()), batch(1))
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in after.params.values()} == {jnp.dtype("float32")}
    np.testing.assert_allclose(report.loss, full.loss, rtol=2e-2)


def test_the_first_tensor_that_is_not_finite_is_named():
    plan = stage()
    step, state = compiled(plan), started(plan)
    names = tensor_names(plan, state.params)
    broken = "encoder.layers.0.mlp.up_proj.kernel"
    state.params[broken] = state.params[broken].at[0, 0].set(jnp.nan)
    _, report = step(state, batch(1))
    assert names[int(report.bad)] == "the loss"

    def sharp(whole, one):  # a finite loss whose gradient is infinite in one place
        found = loss(whole, one)
        return found._replace(total=found.total + jnp.sqrt(whole.adapter.fc1.bias[...][0] * 0))

    frame, params = take_apart(model())
    state = first_state(jax.tree.map(jnp.copy, params), plan)
    _, report = make_step(frame, plan, sharp)(state, batch(1))
    assert names[int(report.bad)] == "the gradient of adapter.fc1.bias"


def test_learning_rates_follow_warm_up_and_cosine():
    plan, part = Stage("s", 11, (Part("p", "", 1e-3),), warmup=4), Part("p", "", 1e-3)
    rates = [float(learning_rate(plan, part, i)) for i in range(12)]
    np.testing.assert_allclose(rates[4], 1e-3, rtol=1e-6)
    np.testing.assert_allclose(rates[11], 1e-6, rtol=1e-3)
    assert rates[0] > 0 and rates[:5] == sorted(rates[:5])
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_low_rank_updates_start_at_nothing_and_train_a_frozen_decoder():
    frame, params = take_apart(model())
    grown = add_lora(jax.tree.map(jnp.copy, params), r"decoder\..*q_proj", rank=2)
    for name, value in fold(grown).items():
        np.testing.assert_array_equal(value, params[name])
    plan = Stage("lora", 3, (Part("decoder", r"decoder\..*\.lora_", 1e-2),))
    state = first_state(grown, plan)
    step = make_step(frame, plan, loss)
    for seed in range(2):
        state, _ = step(state, batch(seed))
    assert equal(params, {name: state.params[name] for name in params})
    changed = {n for n, value in fold(state.params).items() if not equal(value, params[n])}
    assert changed == {f"decoder.layers.{i}.self_attn.q_proj.kernel" for i in (0, 1)}


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


def test_losses_are_what_a_step_divides():
    found = plain(take_apart(model())[1], jax.tree.map(lambda leaf: leaf[0], batch(1)))
    _, report = compiled(stage())(started(stage()), batch(1))
    assert report.count == found.count
    np.testing.assert_allclose(report.loss, found.total / found.count, rtol=1e-6)
