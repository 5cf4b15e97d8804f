import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.ops.partials import Block, Partial, Scoring, Visible, group_queries, merge, read, ungroup


def partial_of(scores, values) -> Partial:
    """The definition, in float64: out = Σ softmax(s)·v, lse = log Σ exp(s)."""
    if scores.size == 0:
        return Partial(jnp.zeros((1, 1, 1, values.shape[-1])), jnp.full((1, 1, 1), -jnp.inf))
    top = scores.max()
    p = np.exp(scores - top)
    out = (p[:, None] * values).sum(0) / p.sum()
    return Partial(
        jnp.asarray(out, jnp.float32)[None, None, None],
        jnp.asarray(top + np.log(p.sum()), jnp.float32)[None, None, None],
    )


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 10_000))
def test_merge_is_the_union_in_any_order_with_empty_parts(a, b, c, seed):
    r = np.random.default_rng(seed)
    scores, values = r.normal(size=a + b + c) * 20, r.normal(size=(a + b + c, 3))
    cuts = [slice(0, a), slice(a, a + b), slice(a + b, a + b + c)]
    x, y, z = (partial_of(scores[s], values[s]) for s in cuts)
    whole = partial_of(scores, values)
    for got in (merge(merge(x, y), z), merge(x, merge(y, z)), merge(merge(z, x), y)):
        np.testing.assert_allclose(got.out, whole.out, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(got.lse, whole.lse, rtol=2e-6)


def test_merge_of_two_empty_halves_is_empty_and_finite():
    nothing = Partial(jnp.zeros((1, 2, 3, 4)), jnp.full((1, 2, 3), -jnp.inf))
    got = merge(nothing, nothing)
    assert (np.asarray(got.out) == 0).all()
    assert (np.asarray(got.lse) == -np.inf).all()


def test_merge_by_hand():
    # Weights 1 and 3 (lse log 1, log 3): out = (1·4 + 3·8) / 4.
    a = Partial(jnp.full((1, 1, 1, 1), 4.0), jnp.zeros((1, 1, 1)))
    b = Partial(jnp.full((1, 1, 1, 1), 8.0), jnp.full((1, 1, 1), np.log(3.0)))
    got = merge(a, b)
    assert float(got.out[0, 0, 0, 0]) == pytest.approx(7.0)
    assert float(got.lse[0, 0, 0]) == pytest.approx(np.log(4.0))


def test_grouping_keeps_heads_with_their_kv_head():
    b, t, k, g, d = 2, 3, 2, 4, 5
    q = jnp.arange(b * t * k * g * d).reshape(b, t, k * g, d)
    grouped = group_queries(q, k)
    assert grouped.shape == (b, k, g * t, d)
    # Head h reads KV head h // G; within it, heads come before tokens.
    np.testing.assert_array_equal(grouped[1, 1, 2 * t + 1], q[1, 1, g + 2])
    np.testing.assert_array_equal(ungroup(grouped, t), q)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_per_query_or_for_all_is_added_to_the_scores(rows, causal):
    r = np.random.default_rng(0)
    query, key, value = r.normal(size=(2, 3, 4, 8)), r.normal(size=(2, 2, 5, 8)), r.normal(
        size=(2, 2, 5, 6))  # fmt: skip
    bias = np.where(r.random((2, rows, 5)) < 0.3, -np.inf, r.normal(size=(2, rows, 5)))
    bias[:, :, 0] = 0.0  # something is always seen
    query, key, value, bias = (x.astype(np.float32) for x in (query, key, value, bias))
    positions = np.asarray([[5, 6, 7], [9, 9, 9]], np.int32)
    block = Block(key, value, np.zeros((2, 5), np.int32), np.ones((2, 5), bool), bias)
    got = read(query, positions, lambda i: block, 1, Scoring(0.5), Visible(causal=causal))
    scores = np.einsum("btkgd,bksd->btkgs", query.reshape(2, 3, 2, 2, 8), key) * 0.5
    scores = scores + bias[:, :, None, None]
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("btkgs,bksd->btkgd", p / p.sum(-1, keepdims=True), value)
    np.testing.assert_allclose(got.out, out.reshape(2, 3, 4, 6), rtol=1e-4, atol=1e-5)
