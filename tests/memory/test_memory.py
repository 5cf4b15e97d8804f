"""The memory beside a decoder: no trace without it, nothing copied, states that travel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import memory
from kvjax.memory import DeltaMemConfig, MemoryParam
from kvjax.memory.attach import initial
from kvjax.memory.config import config_from_json, config_to_json
from kvjax.models.config import DecoderConfig, LayerConfig
from kvjax.models.layer import _pure
from kvjax.models.sharding import abstract_decoder
from tests.memory.conftest import INPUT, base, relative, with_memory

TOKENS = INPUT["write_input_ids"][:2, :8]  # one shape for most tests: one compile


def cached(model, transform=None, batch=2, capacity=32):
    return kvjax.init_cache(model, transform or kvjax.cache(), batch, capacity)


def quiet(cache):
    return memory.with_states(cache, memory.writing(memory.states(cache), False))


def test_a_layer_without_a_memory_compiles_to_the_same_program():
    """Against the layer as it would stand without any of this: norm, projections, attention."""
    cache, block = cached(base()), base().layers[0]
    transform = cache.transform
    x, start = jnp.zeros((2, 4, 64)), jnp.zeros(2, jnp.int32)

    def plain(graph, attend, append, apart, state, x, start, length, layer):
        block = nnx.merge(graph, state)
        chunk = block.self_attn.chunk(block.input_layernorm(x), start, length)
        out, lse = attend(layer, chunk.query, chunk)
        attended = block.self_attn.o_proj(out.astype(x.dtype).reshape(*out.shape[:2], -1))
        x = x + attended
        x = x + block.mlp(block.post_attention_layernorm(x))
        return x, append(layer, chunk, lse), None

    graph, state = nnx.split(block)
    arguments = (graph, transform.attend, transform.append, False, state, x, start, start + 4,
                 cache.layers[0])  # fmt: skip
    wanted = jax.jit(plain, static_argnums=(0, 1, 2, 3)).lower(*arguments).as_text()
    assert _pure.lower(*arguments, None, None).as_text().replace("_run", "plain") == wanted
    assert "beside" not in cache.shared


def test_attaching_copies_no_weight_and_leaves_the_model_alone():
    model = memory.attach(base(), DeltaMemConfig())
    for mine, theirs in zip(
        jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(nnx.state(base())),
        strict=True,
    ):  # fmt: skip
        assert mine is theirs
    assert all(block.beside is None for block in base().layers)
    assert model.tensors().keys() == base().tensors().keys()
    bare = memory.detach(model)
    assert nnx.split(bare)[0] == nnx.split(base())[0]


@pytest.mark.parametrize("dtype", [
    "float32", pytest.param("bfloat16", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_empty_memory_changes_no_bit(dtype):
    model = kvjax.Decoder(base().config, base().tensors(), dtype)
    remembering = memory.attach(model, DeltaMemConfig(heads=("q", "k", "v", "o")), seed=1)
    wanted, _ = kvjax.step(model, TOKENS, cached(model))
    got, cache = kvjax.step(remembering, TOKENS, quiet(cached(remembering)))
    np.testing.assert_array_equal(got, wanted)
    assert not any(np.asarray(s.matrix).any() for s in memory.states(cache))


def test_writing_changes_what_follows():
    cache = cached(with_memory())
    fresh, written = kvjax.step(with_memory(), TOKENS, cache)
    # The entries of an empty cache, the memory of eight tokens.
    recalled = memory.with_states(cache, memory.states(written))
    moved, _ = kvjax.step(with_memory(), TOKENS, recalled)
    assert relative(moved, fresh) > 1e-3
    assert not any(np.asarray(s.matrix).any() for s in memory.states(cache))


def test_padding_neither_reads_nor_writes():
    model = with_memory()
    place = jnp.arange(8)[None].repeat(2, 0)
    _, wanted = kvjax.step(model, TOKENS, cached(model), place < 4)
    moved = jnp.concatenate([TOKENS[:, 4:6], TOKENS[:, :4], TOKENS[:, 6:]], 1)
    logits, got = kvjax.step(model, moved, cached(model), (place >= 2) & (place < 6))
    for mine, theirs in zip(memory.states(got), memory.states(wanted), strict=True):
        np.testing.assert_allclose(mine.matrix, theirs.matrix, atol=1e-6)
    assert not np.asarray(logits[:, :2]).any() and not np.asarray(logits[:, 6:]).any()


def test_chunks_of_any_size_leave_the_same_memory():
    model = with_memory()
    _, wanted = kvjax.step(model, TOKENS, cached(model))
    cache = cached(model)
    for at in range(8):
        _, cache = kvjax.step(model, TOKENS[:, at : at + 1], cache)
    for mine, theirs in zip(memory.states(cache), memory.states(wanted), strict=True):
        assert relative(mine.matrix, theirs.matrix) < 1e-5


@pytest.mark.slow
def test_generation_carries_the_memory():
    model = with_memory()
    out, cache = kvjax.generate(
        model, TOKENS[:, :5], max_new_tokens=3, stop=(), return_cache=True, cache=cached(model)
    )
    whole = jnp.concatenate([TOKENS[:, :5], jnp.asarray(out)], 1)
    _, wanted = kvjax.step(model, whole, cached(model))
    for mine, theirs in zip(memory.states(cache), memory.states(wanted), strict=True):
        assert relative(mine.matrix, theirs.matrix) < 1e-5


def test_it_composes_with_other_caches():
    model = with_memory()
    window = kvjax.cache(select=kvjax.select.streaming(sink=1, recent=4))
    _, wanted = kvjax.step(model, TOKENS, cached(model))
    _, got = kvjax.step(model, TOKENS, cached(model, window))
    assert got.layers[0].recent["k"].shape[2] < wanted.layers[0].recent["k"].shape[2]
    assert memory.states(got)[0].matrix.any()


def test_messages_are_means_in_the_order_of_their_numbers():
    """One write a message, from the mean of its tokens wherever they stand; −1 is never written."""
    module = with_memory(writes="message_mean").layers[0].beside
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 6, 64)), jnp.float32)
    messages = jnp.asarray([[7, -1, 2, 7, 2, 9]])
    reads, state = module.read(hidden, jnp.asarray([5]), module.init(1), messages)
    assert not np.asarray(reads).any()  # all read the state before
    means = jnp.stack([hidden[:, [2, 4]].mean(1), hidden[:, [0, 3]].mean(1)], 1)
    by_token = with_memory().layers[0].beside
    _, wanted = by_token.read(means, jnp.asarray([2]), by_token.init(1))
    np.testing.assert_allclose(state.matrix, wanted.matrix, atol=1e-6)
    _, untouched = module.read(hidden, jnp.asarray([5]), state, jnp.full((1, 6), -1))
    np.testing.assert_array_equal(untouched.matrix, state.matrix)
    with pytest.raises(ValueError, match="which message"):
        module.read(hidden, jnp.asarray([5]), state)


@pytest.mark.parametrize("gates", [True, False])
def test_decoupled_and_scalar_gates_by_hand(gates):
    """Two tokens through the recurrence written out."""
    config = DeltaMemConfig(rank=3, row_gates=gates, coupled=False, normalized=False)
    own = initial(config, base().layers[0].self_attn, jax.random.key(0))
    width = 3 if gates else 1
    rng = np.random.default_rng(1)
    for gate in ("beta", "lambda"):
        own[f"{gate}_proj"] = jnp.asarray(rng.normal(size=(width, 64)) / 8, jnp.float32)
    module = memory.module.DeltaMemory(config, own)
    x = np.asarray(rng.normal(size=(1, 2, 64)), np.float32)
    _, state = module.read(jnp.asarray(x), jnp.asarray([2]), module.init(1))
    matrix = np.zeros((3, 3))
    w = {name: np.asarray(value, np.float64) for name, value in own.items()}
    for token in x[0]:
        k, v = w["memory_k_proj"] @ token, w["memory_v_proj"] @ token
        beta, keep = (
            (1 / (1 + np.exp(-(w[f"{n}_proj"] @ token + w[f"{n}_bias"]))))[:, None]
            for n in ("beta", "lambda")
        )
        matrix = keep * matrix + beta * np.outer(v - matrix @ k, k)
    np.testing.assert_allclose(state.matrix[0, 0], matrix, atol=1e-5)


def test_parameter_counts_of_qwen3_4b():
    config = DecoderConfig(
        family="qwen3", vocab_size=32, hidden_size=2560, intermediate_size=16, num_heads=32,
        num_kv_heads=8, head_dim=128, layers=(LayerConfig(),) * 36, context=64, qk_norm=True,
    )  # fmt: skip
    graph, state = abstract_decoder(config)
    for states, count in ((1, 4_866_336), (4, 19_465_344)):
        def attached(state, states=states):
            model = memory.attach(nnx.merge(graph, state), DeltaMemConfig(states=states))
            return nnx.state(model, MemoryParam)

        leaves = jax.tree.leaves(jax.eval_shape(attached, state))
        assert sum(leaf.size for leaf in leaves) == count
    assert memory.parameter_count(memory.attach(base(), DeltaMemConfig())) == 2 * 8 * 385


def test_first_weights():
    """The first columns of the frozen projection, of length `gain`; λ starts at 1 − β."""
    attention = base().layers[1].self_attn
    for config, filled in (
        (DeltaMemConfig(rank=12), 8), (DeltaMemConfig(rank=12, init="base_slice"), 12),
        (DeltaMemConfig(states=4), 8), (DeltaMemConfig(init="zero"), 0),
    ):  # fmt: skip
        own = initial(config, attention, jax.random.key(0))["delta_o_proj"]
        length = np.linalg.norm(own, axis=0)
        np.testing.assert_allclose(length[:filled], 0.05, rtol=1e-5)
        assert not length[filled:].any() and own.shape == (64, config.width)
        if filled:
            frozen = np.asarray(attention.o_proj.kernel[...])[0]
            np.testing.assert_allclose(own[:, 0], 0.05 * frozen / np.linalg.norm(frozen), rtol=1e-5)
    own = initial(DeltaMemConfig(coupled=False), attention, jax.random.key(0))
    assert not own["beta_proj"].any() and (own["lambda_bias"] == -own["beta_bias"]).all()
    assert abs(own["memory_k_proj"]).max() <= 1 / 8


def test_config_both_ways():
    config = DeltaMemConfig(states=4, writes="message_mean", heads=("q", "o"), layers=(1,))
    data = config_to_json(config)
    assert data["num_state_heads"] == 4 and data["memory_write_granularity"] == "message_mean"
    assert config_from_json(data) == config
    with pytest.raises(ValueError, match="memory_readout_mode"):
        config_from_json(data | {"memory_readout_mode": "slots"})
    with pytest.raises(ValueError, match="rank: '8' is no int"):
        config_from_json(data | {"rank": "8"})


@pytest.mark.parametrize(("change", "message"), [
    ({"rank": 0}, "memory.rank"), ({"mode": "off"}, "memory.mode"), ({"heads": ()}, "memory.heads"),
    ({"heads": ("q", "q")}, "memory.heads"), ({"writes": "sentence"}, "memory.writes"),
    ({"layers": (2,)}, "no layer 2 among 2"),
])  # fmt: skip
def test_wrong_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        memory.attach(base(), DeltaMemConfig(**change))


def test_what_does_not_fit_is_refused():
    weights = memory.tensors(with_memory())
    name = "model.layers.1.self_attn.beta_bias"
    with pytest.raises(ValueError, match=f"{name} is missing"):
        memory.attach(base(), DeltaMemConfig(), {k: v for k, v in weights.items() if k != name})
    with pytest.raises(ValueError, match=f"{name} has shape"):
        memory.attach(base(), DeltaMemConfig(), weights | {name: np.zeros(4)})
    with pytest.raises(ValueError, match="no memory"):
        memory.memory_config(base())
    with pytest.raises(ValueError, match="init_cache"):
        kvjax.step(with_memory(), TOKENS, cached(base()))
    with pytest.raises(ValueError, match="no gates"):
        memory.gate_means(memory.states(cached(with_memory())))


@pytest.mark.slow
def test_only_some_layers():
    model = memory.attach(base(), DeltaMemConfig(layers=(-1,)))
    assert model.layers[0].beside is None and model.layers[1].beside is not None
    assert memory.states(cached(model))[0] is None
    through, _ = kvjax.step(model, TOKENS, cached(model))
    assert relative(through, kvjax.forward(model, TOKENS)) < 1e-5
