import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.generate import Sampling, decode_stretch
from tests.models.hlo import cache_sized

RTN = kvjax.cache(encode=kvjax.encode.rtn(2, 2, tile=16), sink=4)
TRANSFORMS = {
    "exact": kvjax.cache(),
    "streaming": kvjax.cache(select=kvjax.select.streaming(4, 512)),  # one block, no loop
    "rtn": RTN,
    "int8": kvjax.cache(encode=kvjax.encode.int8(tile=16)),
    "kvarn": kvjax.cache(encode=kvjax.encode.kvarn(tile=64), sink=64),
}


def test_ten_questions_leave_the_context_cache_bit_identical(llama):
    model, e = llama
    cache = kvjax.init_cache(model, RTN, 2, 64)
    _, cache = kvjax.prefill(model, e["input_ids"][:, :30], cache)
    before = jax.tree.map(np.array, cache)
    answers = [
        kvjax.generate(model, e["input_ids"][:, 30:34], cache=cache, max_new_tokens=8, stop=())
        for _ in range(10)
    ]
    for answer in answers:
        np.testing.assert_array_equal(answer, answers[0])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, cache), before)


@pytest.mark.parametrize("side", ["leftpad", "rightpad"])
def test_a_padded_row_generates_what_it_would_alone(llama, side):
    model, e = llama
    tokens, mask = e[f"{side}.input_ids"], e[f"{side}.attention_mask"].astype(bool)
    both = kvjax.generate(model, tokens, RTN, mask=mask, max_new_tokens=20, stop=())
    for b in range(2):
        alone = kvjax.generate(model, tokens[b][mask[b]][None], RTN, max_new_tokens=20, stop=())
        np.testing.assert_array_equal(both[b : b + 1], alone)


def test_stretches_equal_single_steps(llama):
    """More than one stretch, and a last one that is shorter, against `step` by `step`."""
    model, e = llama
    prompt = e["input_ids"][:, :10]
    out = kvjax.generate(model, prompt, RTN, max_new_tokens=70, stop=())
    cache = kvjax.init_cache(model, RTN, 2, 256)
    logits, cache = kvjax.step(model, prompt, cache)
    for t in range(70):
        token = np.argmax(np.asarray(logits)[:, -1], -1)
        np.testing.assert_array_equal(out[:, t], token)
        logits, cache = kvjax.step(model, token[:, None], cache, donate=True)


def test_stop_tokens_end_a_row_and_it_appends_nothing_more(llama):
    model, e = llama
    prompt = e["input_ids"][:, :24]
    free = kvjax.generate(model, prompt, max_new_tokens=12, stop=())
    stop = int(free[0, 3])
    out, cache = kvjax.generate(model, prompt, max_new_tokens=12, stop=(stop,), return_cache=True)
    for b in range(2):
        hits = np.flatnonzero(free[b] == stop)
        used = int(hits[0]) + 1 if hits.size else 12
        np.testing.assert_array_equal(out[b, :used], free[b, :used])
        assert (out[b, used:] == model.config.pad_id).all()
        assert int(cache.length[b]) == 24 + used


def test_no_recompilation_after_the_second_stretch(llama):
    model, e = llama
    kvjax.generate(model, e["input_ids"][:, :20], RTN, max_new_tokens=80, stop=())
    held = decode_stretch._cache_size()
    kvjax.generate(model, e["input_ids"][:, :20], RTN, max_new_tokens=200, stop=())
    kvjax.generate(model, e["input_ids"][:, :20], RTN, max_new_tokens=130, stop=())
    again = kvjax.cache(encode=kvjax.encode.rtn(2, 2, tile=16), sink=4)
    kvjax.generate(model, e["input_ids"][:, :20], again, max_new_tokens=200, stop=())
    assert decode_stretch._cache_size() == held


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_compiled_stretch_holds_no_cache_sized_copy(llama, name):
    found = cache_sized(llama[0], TRANSFORMS[name], batch=2, capacity=65536)
    assert found.updates > 0  # the writes themselves are found, so the search works
    assert found.copies == []


def test_the_search_for_copies_finds_one():
    from tests.models.hlo import copies_in

    kept = jnp.zeros((2, 3, 4096, 8))
    program = jax.jit(lambda x: (x, x.at[0, 0, 0].set(1.0))).lower(kept).compile().as_text()
    assert copies_in(program, kept.size)


def logits_of(probabilities):
    return jnp.log(jnp.asarray([probabilities], jnp.float32))


def draws(sampling, probabilities, count=400):
    keys = jax.random.split(jax.random.key(0), count)
    return {int(t) for t in jax.vmap(lambda k: sampling(logits_of(probabilities), k)[0])(keys)}


def test_sampling_by_hand():
    p = [0.5, 0.3, 0.15, 0.05]
    assert draws(Sampling(), p) == {0}
    assert draws(Sampling(1.0), p) == {0, 1, 2, 3}
    assert draws(Sampling(1.0, top_k=2), p) == {0, 1}
    assert draws(Sampling(1.0, top_p=0.5), p) == {0}
    assert draws(Sampling(1.0, top_p=0.6), p) == {0, 1}
    assert draws(Sampling(1.0, top_k=3, top_p=0.99), p) == {0, 1, 2}


def test_sampling_is_seeded(llama):
    model, e = llama

    def run(seed):
        return kvjax.generate(
            model, e["input_ids"][:, :8], max_new_tokens=8, temperature=1.0, seed=seed, stop=()
        )

    np.testing.assert_array_equal(run(1), run(1))
    assert (run(1) != run(2)).any()


@pytest.mark.parametrize(
    "arguments,field",
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"mask": np.zeros((2, 40), bool)}, "padding"),
    ],
)
def test_bad_arguments_are_refused(llama, arguments, field):
    model, e = llama
    with pytest.raises(ValueError, match=field):
        kvjax.generate(model, e["input_ids"], **arguments)


def test_a_cache_without_room_is_refused_before_anything_runs(llama):
    model, e = llama
    cache = kvjax.init_cache(model, RTN, 2, 40)
    with pytest.raises(ValueError, match="capacity"):
        kvjax.generate(model, e["input_ids"], cache=cache, max_new_tokens=1)
    with pytest.raises(ValueError, match="transform"):
        kvjax.generate(model, e["input_ids"][:, :4], kvjax.cache(), cache=cache, max_new_tokens=1)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_shortest_prompts(llama, name):
    """Rows of 1, 2, 3 and 4 tokens in one batch."""
    model, e = llama
    tokens, mask = np.tile(e["input_ids"][:, :4], (2, 1)), np.tri(4, 4, dtype=bool)
    out = kvjax.generate(model, tokens, TRANSFORMS[name], mask=mask, max_new_tokens=3, stop=())
    exact = np.asarray(kvjax.forward(model, tokens))
    np.testing.assert_array_equal(out[:, 0], np.argmax(exact[np.arange(4), np.arange(4)], -1))


def test_finish_gets_a_probe_over_the_frozen_cache(llama):
    """A transform of one's own: `finish` sees each layer's queries and may change the cache."""
    model, e = llama
    base, seen = kvjax.cache(), []

    def finish(cache, probe):
        seen.append([q.shape for q in probe(e["input_ids"][:, 20:24])])
        return cache

    transform = base._replace(finish=finish)
    cache = transform.init(model.cache_spec(), 2, 64)
    import dataclasses

    cache = dataclasses.replace(cache, transform=transform)
    _, cache = kvjax.prefill(model, e["input_ids"][:, :20], cache)
    before = cache.length
    cache = kvjax.finish(model, cache)
    c = model.config
    assert seen == [[(2, 4, c.num_heads, c.head_dim)] * len(c.layers)]
    np.testing.assert_array_equal(cache.length, before)
