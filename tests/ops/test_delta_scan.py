"""delta_scan: its forms and its kernel against each other, reference data, and NumPy in float64."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops.delta_scan import api, reference, tpu, walk
from kvjax.ops.delta_scan.api import best_form, delta_scan
from kvjax.ops.delta_scan.blocks import Blocks, blocks_for
from kvjax.ops.delta_scan.chunked import unit_lower_inverse
from kvjax.ops.delta_scan.reference import Rule, Tokens
from kvjax.ops.delta_scan.rules import gated_delta_rule, log_decay
from tests.golden.delta_mem.reference import FOLDER, arrays

STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
RULES = arrays("rules", Path(FOLDER).parent / "delta_rule")


def relative(got, wanted) -> float:
    wanted = np.asarray(wanted, np.float64)
    return np.abs(np.asarray(got) - wanted).max() / max(np.abs(wanted).max(), 1e-30)


def drawn(tokens, low, high, batch=1, heads=2, rows=4, channels=8, seed=0):
    """Arguments of a delta-mem scan; gates spread evenly over [low, high] in the logarithm of their
    odds, keep and erase apart from each other."""
    rng = np.random.default_rng([seed, tokens])

    def gate(*shape):
        edges = np.log([low / (1 - low), high / (1 - high)])
        return 1 / (1 + np.exp(-rng.uniform(*edges, shape)))

    lead = (batch, tokens, heads)
    key = rng.normal(size=(*lead, channels))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    write = gate(*lead, rows)
    found = (
        rng.normal(size=(batch, heads, rows, channels)),
        rng.normal(size=(*lead, channels)) / channels**0.5,
        key,
        write * rng.normal(size=(*lead, rows)),
        np.log(gate(*lead, rows)),
        write,
    )
    return tuple(jnp.asarray(x, jnp.float32) for x in found)


@partial(jax.jit, static_argnums=0)
def scanned(form, arguments):
    return delta_scan(*arguments, form=form)


@partial(jax.jit, static_argnums=0)
def gradients(form, arguments, weights):
    def loss(arguments):
        found = delta_scan(*arguments, form=form)
        return sum((a * b).sum() for a, b in zip(found, weights, strict=True))

    return jax.grad(loss)(arguments)


def exact(state, query, key, value, decay, erase):
    """The recurrence in NumPy's float64."""
    state, *xs = (np.asarray(x, np.float64) for x in (state, query, key, value, decay, erase))
    reads = []
    for q, k, v, log, e in zip(*(x.swapaxes(0, 1) for x in xs), strict=True):
        reads.append(np.einsum("bhvk,bhk->bhv", state, q))
        added = v - e * np.einsum("bhvk,bhk->bhv", state, k)
        state = np.exp(log)[..., None] * state + added[..., None] * k[..., None, :]
    return np.stack(reads, 1), state


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
@pytest.mark.parametrize(("low", "high", "bound"), [
    (1e-3, 1 - 1e-3, 1e-5), (1e-7, 1 - 1e-6, 5e-5),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 33])
def test_both_forms_are_the_recurrence(form, low, high, bound, tokens):
    arguments = drawn(tokens, low, high)
    for got, wanted in zip(scanned(form, arguments), exact(*arguments), strict=True):
        assert np.abs(np.asarray(got) - wanted).max() < bound


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high", "bound"), [
    (1e-3, 1 - 1e-3, 1e-5), (1e-7, 1 - 1e-6, 5e-5),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
def test_chunked_equals_recurrent_at_every_length(low, high, bound, tokens):
    arguments = drawn(tokens, low, high, batch=2, heads=2, rows=8)
    pair = [scanned(form, arguments) for form in ("chunked", "recurrent")]
    for got, wanted, right in zip(*pair, exact(*arguments), strict=True):
        assert np.abs(np.asarray(got) - np.asarray(wanted)).max() < bound
        assert np.abs(np.asarray(got) - right).max() < bound
    rng = np.random.default_rng(tokens)
    weights = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in pair[0]]
    pair = [gradients(form, arguments, weights) for form in ("chunked", "recurrent")]
    for got, wanted in zip(*pair, strict=True):
        assert relative(got, wanted) < 1e-4


@pytest.mark.parametrize("form", [
    pytest.param("recurrent", marks=pytest.mark.slow), "chunked",
])  # fmt: skip
def test_gradients_from_chunk_starts_are_those_of_the_plain_scan(form):
    arguments = drawn(11, 1e-3, 1 - 1e-3)

    def loss(run, arguments):
        reads, state = run(arguments)
        return (jnp.sin(reads) * jnp.arange(reads.size).reshape(reads.shape)).mean() + (
            jnp.cos(state) * jnp.arange(state.size).reshape(state.shape)
        ).mean()

    def plain(arguments):  # no custom gradient, no chunk
        tokens = Tokens(*(x.swapaxes(0, 1) for x in arguments[1:]))
        state, reads = reference.recurrent(Rule(), arguments[0], tokens)
        return reads.swapaxes(0, 1), state

    wanted = jax.jit(jax.grad(partial(loss, plain)))(arguments)
    got = jax.jit(jax.grad(partial(loss, lambda a: delta_scan(*a, form=form, chunk=4))))(arguments)
    for a, b in zip(got, wanted, strict=True):
        assert relative(a, b) < 1e-4


def test_strong_decay_neither_overflows_nor_cancels():
    """Sums of logarithms below −2,000 in a chunk, and the gradient through them."""
    arguments = list(drawn(33, 0.1, 0.9))
    arguments[4] = jnp.where(jnp.arange(33)[:, None, None] % 8 == 5, -600.0, arguments[4])
    arguments = tuple(arguments)
    for got, wanted in zip(scanned("chunked", arguments), exact(*arguments), strict=True):
        assert np.abs(np.asarray(got) - wanted).max() < 1e-5
    weights = [jnp.ones(x.shape) for x in scanned("chunked", arguments)]
    plain = gradients("recurrent", arguments, weights)
    for got, wanted in zip(gradients("chunked", arguments, weights), plain, strict=True):
        assert relative(got, wanted) < 1e-4


def test_unit_lower_inverse():
    a = np.tril(np.random.default_rng(0).normal(size=(3, 8, 8)), -1).astype(np.float32)
    product = np.asarray(unit_lower_inverse(jnp.asarray(a))) @ (np.eye(8) + a)
    assert np.abs(product - np.eye(8)).max() < 1e-3 * np.abs(np.linalg.inv(np.eye(8) + a)).max()


@pytest.mark.parametrize("form", [
    pytest.param("recurrent", marks=pytest.mark.slow), "chunked",
])  # fmt: skip
@pytest.mark.parametrize(
    "case",
    ["deltanet_beta2", "gdn_strong_decay", "gdn2", "kda_strong_decay", "kda_grouped_value_heads"],
)
def test_delta_rules_match_the_reference(case, form):
    given = {name: jnp.asarray(RULES[f"{case}.{name}"]) for name in ("q", "k", "v")}
    gates = {name: RULES.get(f"{case}.{name}") for name in ("beta", "g", "b", "w")}
    beta = gates["w"] if gates["beta"] is None else gates["beta"]
    run = jax.jit(partial(gated_delta_rule, form=form))
    out, _ = run(*given.values(), jnp.asarray(beta), gates["g"], RULES[f"{case}.initial_state"],
                 erase=gates["b"])  # fmt: skip
    assert relative(out, RULES[f"{case}.o"]) < 2e-6


def test_log_decays_match_the_reference():
    for rule, name, bound in (("gdn", "g", None), ("kda", "g", None),
                              ("kda", "g_lower_bound5", -5.0)):  # fmt: skip
        given = [jnp.asarray(RULES[f"{rule}.gate.{n}"]) for n in ("in", "A_log", "dt_bias")]
        assert relative(log_decay(*given, bound), RULES[f"{rule}.gate.{name}"]) < 1e-6


def test_no_decay_and_no_state_are_the_plain_delta_rule():
    """Writing a pair with beta 1 makes its value readable at its key."""
    key = jnp.eye(4)[None, :2, None]  # two orthogonal keys
    value = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 1, 3)), jnp.float32)
    out, state = gated_delta_rule(key, key, value, jnp.ones((1, 2, 1)), scale=1.0)
    np.testing.assert_allclose(out, value, atol=1e-6)
    np.testing.assert_allclose(state[0, 0, :2], value[0, :, 0], atol=1e-6)


def test_silent_tokens_leave_the_state_to_the_last_bit():
    arguments = drawn(5, 0.1, 0.9)
    silent = [jnp.zeros_like(x) for x in arguments[3:]]
    _, state = delta_scan(*arguments[:3], *silent)
    np.testing.assert_array_equal(state, arguments[0])


@pytest.mark.parametrize(("per", "read", "gate", "tokens"), [
    ("row", "before", 5, 13),
    pytest.param("row", "after", 1, 13, marks=pytest.mark.slow),
    pytest.param("key", "after", 12, 13, marks=pytest.mark.slow),
    pytest.param("key", "before", 1, 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_tpu_kernel_is_the_recurrence(per, read, gate, tokens):
    rng, lead, rows, channels = np.random.default_rng(3), (tokens, 3, 2), 5, 12

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    state, rule = normal(3, 2, rows, channels), Rule(per, read)
    given = Tokens(
        normal(*lead, channels), normal(*lead, channels) / 4, normal(*lead, rows),
        -jnp.abs(normal(*lead, gate)), jax.nn.sigmoid(normal(*lead, 1)),
        normal(*lead, channels) / 4 if per == "key" else None,
    )  # fmt: skip
    assert not tpu.refusal(rule, state, given)
    final, reads, starts = tpu.scan(rule, state, given, 8, interpret=STRICT)
    wanted, wanted_reads = reference.recurrent(rule, state, given)
    np.testing.assert_allclose(final, wanted, atol=1e-5)
    np.testing.assert_allclose(reads, wanted_reads, atol=1e-5)
    np.testing.assert_array_equal(starts[0], state)
    if tokens > 8:
        part = jax.tree.map(lambda x: x[:8], given)
        np.testing.assert_allclose(
            starts[1], reference.recurrent(rule, state, part)[0], atol=1e-5
        )


@pytest.mark.slow
def test_the_gradient_behind_the_kernel(monkeypatch):
    """From the states that the kernel keeps at the starts of its chunks."""
    monkeypatch.setattr(walk.tpu, "scan", partial(tpu.scan, interpret=True))
    arguments = drawn(19, 0.1, 0.9)
    tokens = Tokens(*(x.swapaxes(0, 1) for x in arguments[1:]))

    def loss(kernel, arguments):
        found = walk.scan(walk.Walk(Rule(), "recurrent", 8, kernel), *arguments)
        return sum((x * jnp.arange(x.size).reshape(x.shape)).mean() for x in found)

    got, wanted = (jax.grad(partial(loss, kernel))((arguments[0], tokens))
                   for kernel in (True, False))  # fmt: skip
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert relative(a, b) < 1e-5


def test_more_rows_than_one_block_of_lanes():
    arguments = drawn(9, 0.1, 0.9, batch=5, heads=8, rows=4)
    by_time = Tokens(*(x.swapaxes(0, 1) for x in arguments[1:]))
    blocks = Blocks(128, 8)
    final, reads, _ = tpu.scan(Rule(), arguments[0], by_time, None, blocks, interpret=True)
    wanted, wanted_reads = reference.recurrent(Rule(), arguments[0], by_time)
    np.testing.assert_allclose(final, wanted, atol=1e-5)
    np.testing.assert_allclose(reads, wanted_reads, atol=1e-5)


def test_blocks_are_checked_and_fit():
    assert blocks_for(8, 8) == Blocks(128, 64)
    assert blocks_for(4096, 8).lanes == 512 and blocks_for(4096, 32).lanes == 128
    with pytest.raises(ValueError, match="lanes=100"):
        Blocks(100)
    with pytest.raises(ValueError, match="tokens=12"):
        Blocks(128, 12)


def test_the_form_follows_shape_and_backend():
    assert best_form("cpu", 8 * 8, 1) == best_form("cpu", 128 * 128, 128) == "recurrent"
    assert best_form("cpu", 128 * 128, 1) == best_form("tpu", 8 * 8, 8) == "chunked"
    large = drawn(2, 0.1, 0.9, rows=40)
    with pytest.raises(ValueError, match="40 × 8 are too large"):
        delta_scan(*large, implementation="tpu")


@pytest.mark.parametrize(("change", "message"), [
    ({"per": "column"}, "per='column'"), ({"read": "now"}, "read='now'"),
    ({"form": "fast"}, "form='fast'"), ({"chunk": 48}, "chunk=48"),
    ({"implementation": "gpu"}, "no such kernel"),
])  # fmt: skip
def test_unknown_choices_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        delta_scan(*drawn(3, 0.1, 0.9), **change)


@pytest.mark.parametrize(("index", "shape", "message"), [
    (0, (1, 2, 8, 4), "state has shape"), (1, (3, 2, 8), "query has shape"),
    (3, (1, 4, 2, 4), "value has shape"), (4, (1, 3, 2, 8), "decay has shape"),
    (5, (1, 3, 2, 3), "erase has shape"),
])  # fmt: skip
def test_wrong_shapes_are_refused(index, shape, message):
    arguments = list(drawn(3, 0.1, 0.9))
    arguments[index] = jnp.zeros(shape)
    with pytest.raises(ValueError, match=message):
        delta_scan(*arguments)
    with pytest.raises(ValueError, match="erase_key has shape"):
        delta_scan(*drawn(3, 0.1, 0.9), jnp.zeros((1, 3, 2, 4)))


def test_one_token_takes_no_loop():
    text = str(jax.make_jaxpr(lambda a: delta_scan(*a))(drawn(1, 0.1, 0.9)))
    assert "scan" not in text.replace(api.NAME, "") and "while" not in text
