"""delta-mem against what the original computes: states, reads, gates, logits, loss, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import memory
from kvjax.memory import DeltaMemConfig, MemoryParam
from kvjax.memory.config import MODES
from kvjax.memory.module import DeltaMemory
from kvjax.models.decoder import embed, forward_beside, init_beside, unembed
from tests.golden.delta_mem.reference import arrays
from tests.memory.conftest import (
    COLUMNS,
    INPUT,
    READ_MASK,
    WRITE_MASK,
    adapter,
    base,
    relative,
    with_memory,
)

PASSES, DECODE, TRAIN = arrays("passes"), arrays("decode"), arrays("train")
WRITES = {"tsw": "token", "ssw": "message_mean"}


@jax.jit
def passes(model):
    """Logits of the write pass, the states after it, and logits of a read pass without writes."""
    empty = memory.writing(init_beside(model, 3), True, record=True)
    written, states = forward_beside(
        model, INPUT["write_input_ids"], empty, WRITE_MASK, INPUT["write_message_ids"]
    )
    frozen = memory.writing(states, False, record=True)
    read, after = forward_beside(model, INPUT["read_input_ids"], frozen, READ_MASK)
    return unembed(model, written), states, unembed(model, read), after


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("kind", "mode"), [
    ("tsw", "standard"),
    *(pytest.param("tsw", mode, marks=SLOW) for mode in ("lambda_outside", "no_lambda")),
    *(pytest.param("ssw", mode, marks=SLOW) for mode in MODES),
])  # fmt: skip
def test_states_logits_and_gates(kind, mode):
    written, states, read, after = passes(with_memory(writes=WRITES[kind], mode=mode))
    wanted = {
        key.removeprefix(f"{kind}.{mode}."): value
        for key, value in PASSES.items()
        if key.startswith(f"{kind}.{mode}.")
    }
    for layer, state in enumerate(states):
        assert relative(state.matrix[:, 0], wanted[f"state.{layer}"]) < 2e-5
        np.testing.assert_array_equal(after[layer].matrix, state.matrix)
    assert relative(read[..., COLUMNS], wanted["read.logits"]) < 2e-5
    if mode == "standard":
        # The original sums over gates and divides by tokens: rank times the mean.
        for held, name in ((states, "write"), (after, "read")):
            mean = memory.gate_means(held)[1] * 8
            assert relative(mean, wanted[f"{name}.beta_mean.1"]) < 2e-5
    if "write.logits" in wanted:
        assert relative(written[..., COLUMNS], wanted["write.logits"]) < 2e-5


def layer_0():
    """What the first layer's attention sees in the write pass, whatever memory there is: hidden,
    row lengths and message ids, left-aligned, and the order that aligned them."""
    order = np.argsort(~np.asarray(WRITE_MASK), 1, kind="stable")
    tokens = jnp.take_along_axis(INPUT["write_input_ids"], order, 1)
    messages = jnp.take_along_axis(INPUT["write_message_ids"], order, 1)
    hidden = base().layers[0].input_layernorm(embed(base(), tokens))
    return hidden, WRITE_MASK.sum(1).astype(jnp.int32), messages, order


def test_reads_and_gates_of_each_token():
    hidden, length, _, order = layer_0()
    module = with_memory().layers[0].beside
    reads, _ = module.read(hidden, length, module.init(3))
    real = np.arange(40) < np.asarray(length)[:, None]
    for got, name in ((reads, "reads"), (module.controls(hidden).beta, "beta")):
        wanted = np.take_along_axis(PASSES[f"tsw.standard.write.{name}.0"], order[..., None], 1)
        assert relative(np.where(real[..., None], got[:, :, 0], 0), wanted) < 2e-5


@pytest.mark.parametrize("mode", ["lambda_outside", "no_lambda"])
@pytest.mark.parametrize("kind", WRITES)
def test_the_other_modes(kind, mode):
    hidden, length, messages, _ = layer_0()
    module = with_memory(writes=WRITES[kind], mode=mode).layers[0].beside
    _, state = module(hidden, length, module.init(3), messages)
    assert relative(state.matrix[:, 0], PASSES[f"{kind}.{mode}.state.0"]) < 2e-5


@pytest.mark.parametrize("kind", ["msw", "mssw"])
def test_four_states(kind):
    writes = "token" if kind == "msw" else "message_mean"
    config = DeltaMemConfig(states=4, writes=writes, heads=("q",))
    own = {name.rpartition(".")[2]: value for name, value in adapter("msw").items()}
    module = DeltaMemory(config, own | {"delta_q_proj": np.zeros((64, 32), np.float32)})
    hidden, length, messages, _ = layer_0()
    _, state = module(hidden, length, module.init(3), messages)
    assert relative(state.matrix, PASSES[f"{kind}.standard.state.0"]) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITES)
def test_decoding_with_writes(kind):
    model, wanted = with_memory(writes=WRITES[kind]), DECODE[f"{kind}.logits"]
    cache = kvjax.init_cache(model, kvjax.cache(), 2, 46)
    at, states = 0, []
    for width in (15, 25, 1, 1, 1, 1, 1, 1):
        here = slice(at, at + width)
        messages = jnp.asarray(DECODE["in.message_ids"][:, here], jnp.int32)
        tokens = DECODE["in.input_ids"][:, here].astype(np.int32)
        logits, cache = kvjax.step(model, tokens, cache, messages=messages)
        assert relative(logits[..., COLUMNS], wanted[:, here]) < 2e-5
        states.append(np.stack([s.matrix[:, 0] for s in memory.states(cache)]))
        at += width
    assert relative(np.stack([states[1], states[7]]), DECODE[f"{kind}.states"]) < 2e-5


def episode_loss(graph, weights, frozen):
    """Write pass with gradient, read pass, cross-entropy; the gate regulariser beside it."""
    model = nnx.merge(graph, weights, frozen)
    given = {k.removeprefix("batch.in."): jnp.asarray(v, jnp.int32) for k, v in TRAIN.items()
             if k.startswith("batch.in.")}  # fmt: skip
    _, states = forward_beside(
        model, given["write_input_ids"], init_beside(model, 3),
        given["write_attention_mask"].astype(bool), given["write_message_ids"],
    )  # fmt: skip
    hidden, after = forward_beside(
        model, given["input_ids"], memory.writing(states, False, record=True),
        given["attention_mask"].astype(bool),
    )  # fmt: skip
    chances = jax.nn.log_softmax(unembed(model, hidden)[:, :-1])
    label = given["labels"][:, 1:]
    picked = jnp.take_along_axis(chances, jnp.maximum(label, 0)[..., None], 2)[..., 0]
    loss = -jnp.where(label >= 0, picked, 0).sum() / (label >= 0).sum()
    return loss, (states, memory.gate_means(after))


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITES)
def test_loss_and_gradients(kind):
    parts = nnx.split(with_memory(writes=WRITES[kind]), MemoryParam, ...)
    run = jax.jit(jax.value_and_grad(episode_loss, argnums=1, has_aux=True), static_argnums=0)
    (loss, (states, gates)), gradient = run(*parts)
    wanted = {k.removeprefix(f"batch.{kind}."): v for k, v in TRAIN.items() if f".{kind}." in k}
    assert relative(loss, wanted["ce"]) < 1e-5
    total = loss + 0.01 * ((gates * 8 - 0.05) ** 2).mean()
    assert relative(total, wanted["total"]) < 1e-5
    assert relative(gates * 8, wanted["beta_mean"]) < 1e-5
    for state, of_layer in zip(states, wanted["state"], strict=True):
        assert relative(state.matrix[:, 0], of_layer) < 2e-5
    found = memory.tensors(nnx.merge(parts[0], gradient, parts[2]))
    checked = [key for key in wanted if key.startswith("grad_ce.0.")]
    assert len(checked) >= 3
    for key in checked:
        name = f"model.layers.0.self_attn.{key.removeprefix('grad_ce.0.')}"
        assert relative(found[name], wanted[key]) < 1e-4
