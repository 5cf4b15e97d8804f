"""Inputs in place of tokens, documents packed into a row, and layers that look both ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.decoder import embed, forward_hidden
from tests.models.conftest import golden


def test_inputs_are_embedded_tokens():
    model, e = golden("gemma2")  # which scales its embeddings
    tokens = e["leftpad.input_ids"]
    mask = e["leftpad.attention_mask"]
    np.testing.assert_allclose(
        kvjax.forward(model, embed(model, tokens), mask),
        kvjax.forward(model, tokens, mask), atol=1e-5,
    )  # fmt: skip


def test_packed_documents_are_documents_alone():
    model, e = golden("qwen3")
    one, two = e["input_ids"][0, :9], e["input_ids"][1, :14]
    row = jnp.asarray(np.concatenate([one, two, one[:3]])[None])
    segments = jnp.asarray(np.repeat([0, 1, -1], [9, 14, 3])[None])
    hidden = forward_hidden(model, row, segments=segments)[0]
    both = jnp.asarray(np.stack([np.pad(one, (0, 5)), two]))
    alone = forward_hidden(model, both)  # what follows a document changes nothing in it
    np.testing.assert_allclose(hidden[:9], alone[0, :9], atol=2e-4)
    np.testing.assert_allclose(hidden[9:23], alone[1], atol=2e-4)


def test_both_ways_the_first_state_sees_the_last_token_and_padding_stays_unseen():
    model, e = golden("qwen3")
    tokens = jnp.asarray(e["input_ids"][:1, :8])
    mask = jnp.arange(8)[None] < 6

    @jax.jit
    def first(tokens):
        return forward_hidden(model, tokens, mask, causal=False)[0, 0]

    before = first(tokens)
    np.testing.assert_array_equal(first(tokens.at[0, 6:].set(3)), before)
    assert np.abs(np.asarray(first(tokens.at[0, 5].set(3)) - before)).max() > 1e-3


def test_what_is_refused():
    model, e = golden("gemma2")
    tokens = jnp.asarray(e["input_ids"])
    with pytest.raises(ValueError, match="segments and mask exclude each other"):
        forward_hidden(model, tokens, tokens > 0, segments=tokens)
    with pytest.raises(ValueError, match="use a model without windows"):
        forward_hidden(model, tokens, causal=False)
    size = model.config.hidden_size
    with pytest.raises(ValueError, match=r"mask has shape \(1, 3\) and tokens \(1, 2\)"):
        kvjax.forward(model, np.zeros((1, 2, size), np.float32), np.ones((1, 3), bool))
