"""A chunk over itself, many blocks long: packed documents, and an encoder that looks both ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.attend import BLOCK, own_partial
from kvjax.cache.segments import Chunk
from kvjax.cache.spec import heads_spec
from kvjax.ops.partials import Visible

TOKENS = 2 * BLOCK + 90
SEGMENTS = np.repeat([0, 1, 2, -1], [200, BLOCK + 70, 50, 26])
PADDED = 30  # of the second row, where no segments are given


def dense(q, k, v, allowed):
    """Attention by the book; allowed [B,T,S]. Rows that see nothing give 0."""
    scores = jnp.where(allowed[:, None], jnp.einsum("bthd,bhsd->bhts", q, k), -1e30)
    weights = jnp.where(allowed[:, None], jax.nn.softmax(scores, -1), 0)
    return jnp.einsum("bhts,bhsd->bthd", weights, v)


@pytest.mark.parametrize(
    ("causal", "packed"),
    [(True, True), (False, False), *(pytest.param(*x, marks=pytest.mark.slow)
                                     for x in ((True, False), (False, True)))],
)  # fmt: skip
def test_equals_dense_attention_with_gradients(causal, packed):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, TOKENS, 2, 4)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, 2, 2, TOKENS, 4)), jnp.float32)
    length = np.array([TOKENS, TOKENS if packed else TOKENS - PADDED], np.int32)
    segments = np.stack([SEGMENTS, np.roll(SEGMENTS, 77)]) if packed else None
    spec = heads_spec(2, 2, 4, scale=1.0)
    order = np.arange(TOKENS)
    allowed = (order < length[:, None])[:, None, :] & (order[:, None] >= (order if causal else 0))
    if segments is not None:
        allowed &= segments[:, :, None] == segments[:, None, :]
    real = jnp.asarray(order < length[:, None])[..., None, None]

    def own(q, k, v):
        chunk = Chunk({"k": k, "v": v}, jnp.zeros(2, jnp.int32), jnp.asarray(length), q)
        found = own_partial(spec, q, chunk, Visible(causal=causal), False,
                            None if segments is None else jnp.asarray(segments))  # fmt: skip
        return jnp.where(real, found.out, 0)

    def book(q, k, v):
        return jnp.where(real, dense(q, k, v, jnp.asarray(allowed)), 0)

    weigh = jnp.asarray(rng.normal(size=(2, TOKENS, 2, 4)), jnp.float32)
    got, wanted = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) * weigh).sum(), argnums=(0, 1, 2)))(
            q, k, v
        )
        for f in (own, book)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)
