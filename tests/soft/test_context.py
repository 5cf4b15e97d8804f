"""Contexts: equal to the batch path, whatever the passes; saved and loaded; through any cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.io.files import FileError
from kvjax.soft import Context, Region, Shape, Text, collate, encode_context, lay_out, prompt
from kvjax.soft.model import new_model
from tests.soft.conftest import part, settings, stacks
from tests.soft.test_model import SHAPE, _scores, close, everything

DOCUMENTS = [np.arange(2, 79), np.arange(0), np.arange(30, 33), np.arange(2, 66)]
PARTS = [Text([4, 5]), Region(DOCUMENTS[0]), Text([6]), Region(DOCUMENTS[1]),
         Region(DOCUMENTS[2]), Text([7, 8])]  # fmt: skip


@pytest.fixture(scope="module")
def encoded():
    from tests.soft.conftest import model

    lclm = model(settings())
    return lclm, encode_context(lclm, DOCUMENTS, windows_per_pass=2)


def test_a_context_is_what_a_batch_would_hold(encoded):
    lclm, context = encoded
    assert [len(x) for x in context.documents] == [10, 0, 1, 8]
    row = lay_out(PARTS, lclm.config)
    batch = collate([[row]], lclm.config, SHAPE)
    got = prompt(lclm, [[4, 5], context[0], [6], context[1], context[2], [7, 8]])
    close(got[0], everything(lclm, batch)[0].embeddings[0, : len(row.tokens)])


def test_the_number_of_windows_in_a_pass_changes_nothing(encoded):
    lclm, context = encoded
    for got, wanted in zip(encode_context(lclm, DOCUMENTS, windows_per_pass=9).documents,
                           context.documents, strict=True):  # fmt: skip
        assert got.shape == wanted.shape
        if len(wanted):
            close(got, wanted)


def test_nothing_to_encode(encoded):
    lclm, _ = encoded
    assert encode_context(lclm, []).documents == ()
    assert encode_context(lclm, [[]])[0].shape == (0, 64)


@pytest.mark.slow
def test_an_attention_adapter_reads_the_whole_document():
    encoder, decoder = stacks()
    config = settings(adapter="attn_mlp")
    lclm = new_model(encoder, decoder, config)
    got = encode_context(lclm, [DOCUMENTS[0], DOCUMENTS[1]], windows_per_pass=2)
    row = lay_out([Region(DOCUMENTS[0])], config)
    batch = collate([[row]], config, Shape(1, 16, 4))
    close(got[0], everything(lclm, batch)[0].soft[0, 1:11])
    assert got[1].shape == (0, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_is_loaded(encoded, tmp_path, dtype):
    _, context = encoded
    context = Context(tuple(x.astype(dtype) for x in context.documents))
    context.save(tmp_path / "new" / "context.safetensors")
    again = Context.load(tmp_path / "new" / "context.safetensors")
    assert len(again) == len(context)
    for got, wanted in zip(again.documents, context.documents, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


def test_a_damaged_context_is_refused(encoded, tmp_path):
    path = tmp_path / "context.safetensors"
    with pytest.raises(FileError, match="no such file"):
        Context.load(path)
    encoded[1].save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileError, match="outside"):
        Context.load(path)


def test_greedy_tokens_equal_the_official_code(encoded):
    lclm, _ = encoded
    layout = part("mean8.")
    ids = layout["input_ids"][0][layout["labels_sft"][0] == -100]
    ids = ids[: np.flatnonzero(ids == 109)[-1] + 5]  # padding is behind the target
    regions = encode_context(lclm, [part("region.")["0.0"], part("region.")["0.1"]])
    parts, at = [], 0
    for i, start in enumerate(np.flatnonzero(ids == 107)):
        parts += [ids[at:start], regions[i]]
        at = int(np.flatnonzero(ids == 109)[i]) + 1
    fed = prompt(lclm, [*parts, ids[at:]])
    got = kvjax.generate(lclm.decoder, fed, max_new_tokens=8, stop=())
    np.testing.assert_array_equal(got, layout["greedy8_row0"])


ENCODERS = {
    "int8": kvjax.encode.int8(tile=32),
    "kvarn": kvjax.encode.kvarn(key_bits=4, value_bits=4, tile=32),
    "heed": kvjax.encode.heed(key_bits=4, value_bits=4, tile=32),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("kvarn", "heed")]


@pytest.mark.parametrize("name", ["int8", *SLOW])
def test_soft_tokens_go_through_any_cache(encoded, name):
    """Prefilled in two chunks, so that the second reads the first as it was stored."""
    lclm, context = encoded
    fed = prompt(lclm, [range(4, 14), *[context[0]] * 4, range(20, 26)])
    assert fed.shape[1] == 64
    alone = _scores(*nnx.split(lclm.decoder), jnp.tile(fed, (2, 1, 1)), jnp.zeros((2, 64), int))
    exact = alone[:1, -1]
    cache = kvjax.init_cache(lclm.decoder, kvjax.cache(encode=ENCODERS[name]), 1, 64)
    got, cache = kvjax.prefill(lclm.decoder, fed, cache, chunk=32)
    assert int(cache.length[0]) == 64
    assert 1e-5 < float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact)) < 0.25


@pytest.mark.slow
def test_padded_rows_of_inputs_equal_rows_alone(encoded):
    lclm, context = encoded
    short, long = (prompt(lclm, [p, [6, 7]]) for p in (context[2], context[0]))
    gap = long.shape[1] - short.shape[1]
    both = jnp.concatenate([jnp.pad(short, ((0, 0), (gap, 0), (0, 0))), long])
    mask = jnp.arange(long.shape[1]) >= jnp.array([[gap], [0]])
    cache = kvjax.init_cache(lclm.decoder, kvjax.cache(), 2, 32)
    got, _ = kvjax.prefill(lclm.decoder, both, cache, mask)
    for row, alone in zip(got, (short, long), strict=True):
        close(row, kvjax.forward(lclm.decoder, alone)[0, -1])


def test_what_cannot_be_prompted(encoded):
    lclm, context = encoded
    with pytest.raises(ValueError, match="width 64"):
        prompt(lclm, [jnp.zeros((3, 32))])
    with pytest.raises(ValueError, match="at least one token"):
        prompt(lclm, [])
    with pytest.raises(ValueError, match="within the decoder's vocabulary"):
        prompt(lclm, [[110]])
    with pytest.raises(ValueError, match="windows_per_pass is 0"):
        encode_context(lclm, DOCUMENTS, windows_per_pass=0)
    with pytest.raises(ValueError, match="compresses by"):
        encode_context(lclm, DOCUMENTS, ratio=4)
    with pytest.raises(ValueError, match="inputs has shape"):
        kvjax.forward(lclm.decoder, jnp.zeros((1, 3, 32)))
    with pytest.raises(ValueError, match="inputs has dtype"):
        kvjax.forward(lclm.decoder, jnp.zeros((1, 3, 64), jnp.int32))


def test_a_pass_is_one_program_whatever_the_document(encoded):
    from kvjax.soft.context import _pass

    lclm, _ = encoded
    before = _pass._cache_size()
    encode_context(lclm, [np.arange(2, 90)] * 3, windows_per_pass=2)
    assert _pass._cache_size() == before
    assert jax.tree.leaves(encode_context(lclm, [], windows_per_pass=2).documents) == []
