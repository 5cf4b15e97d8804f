"""Chunked cross-entropy is the plain one, and never holds all logits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.soft.model import cross_entropy
from kvjax.train import chunked_cross_entropy

B, T, E, V = 2, 21, 8, 37


def made(dtype="float32"):
    draw = np.random.default_rng(0)
    hidden = jnp.asarray(draw.normal(size=(B, T, E)), dtype)
    weight = jnp.asarray(draw.normal(size=(V, E)), dtype)
    wanted = draw.integers(0, V, (B, T))
    wanted[draw.random((B, T)) < 0.3] = -100
    return hidden, weight, jnp.asarray(wanted, jnp.int32)


def plain(hidden, weight, wanted, softcap):
    scores = jnp.einsum("bte,ve->btv", hidden, weight, preferred_element_type=jnp.float32)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    return cross_entropy(scores, wanted)


@pytest.mark.parametrize(("chunk", "softcap"), [(1, None), (8, 5.0), (64, None)])
def test_it_equals_the_plain_one_with_gradients(chunk, softcap):
    hidden, weight, wanted = made()
    ours = jax.value_and_grad(
        lambda h, w: chunked_cross_entropy(h, w, wanted, chunk, softcap), (0, 1), has_aux=True
    )(hidden, weight)
    theirs = jax.value_and_grad(lambda h, w: plain(h, w, wanted, softcap), (0, 1), has_aux=True)(
        hidden, weight
    )
    assert ours[0][1] == theirs[0][1] == (wanted != -100).sum()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_the_gradient_of_a_16_bit_head_is_summed_in_float32():
    hidden, weight, wanted = made("bfloat16")
    gradients = [
        jax.grad(lambda w, c=chunk: chunked_cross_entropy(hidden, w, wanted, c)[0])(weight)
        for chunk in (1, T)
    ]
    np.testing.assert_allclose(*(np.asarray(g, "float32") for g in gradients), rtol=8e-3, atol=1e-2)


def test_no_program_holds_all_logits():
    hidden, weight, wanted = made()
    run = jax.grad(lambda h, w: chunked_cross_entropy(h, w, wanted, 3)[0], (0, 1))
    text = str(jax.make_jaxpr(run)(hidden, weight))
    shapes = [
        [int(n) for n in found.split(",")] for found in re.findall(r"f32\[([\d,]+)\]", text)
    ]
    with_vocabulary = [s for s in shapes if V in s]
    assert with_vocabulary and max(np.prod(s) for s in with_vocabulary) <= max(B * 3 * V, V * E)


def test_a_chunk_below_one_is_refused():
    with pytest.raises(ValueError, match="chunk is 0"):
        chunked_cross_entropy(*made(), 0)
