import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import encode
from kvjax.ops.encode_tile import heed as reference
from tests.encode.contract import check_contract, relative, run


def tiles(seed=0, shape=(2, 3), tokens=64, dim=32):
    """Keys with a few strong channels and a common offset, and queries [..., 2·tokens, dim] whose
    power lies in few directions."""
    r = np.random.default_rng(seed)
    key = r.normal(size=(*shape, tokens, dim)) * r.lognormal(0, 1, dim) + r.normal(size=dim)
    mix = r.normal(size=(dim, dim)) * 2.0 ** -np.arange(dim)[:, None]
    query = r.normal(size=(*shape, 2 * tokens, dim)) @ mix
    return key.astype(np.float32), query.astype(np.float32)


def decode(encoder, x, role, query=None):
    tile = jax.jit(encoder.encode_tile_for, static_argnums=1)(x, role, query)
    return np.asarray(encoder.unrotate(encoder.decode_tile(tile, role, x.shape[-1]), role))


def score_error(encoder, key, query):
    """Relative error of q·k over the queries that the encoder saw."""
    wanted = np.einsum("...nd,...td->...nt", query, key)
    got = np.einsum("...nd,...td->...nt", query, decode(encoder, key, "key", query))
    return relative(got, wanted)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_feedback_makes_scores_far_better_than_rounding_alone(bits):
    key, query = tiles()
    encoder = encode.heed(bits, bits, tile=64)
    alone = dataclasses.replace(encoder, feedback=False)
    assert score_error(encoder, key, query) < 0.6 * score_error(alone, key, query)


def test_the_factor_rebuilds_the_query_covariance():
    _, query = tiles(shape=())
    order, factor = (np.asarray(x, np.float64) for x in reference.order_and_factor(query))
    power = query.astype(np.float64).T @ query
    power = power / (np.trace(power) / 32) + reference.DAMPING * np.eye(32)
    power = power[order.astype(int)][:, order.astype(int)]
    assert (np.diff(np.diag(power)) <= 1e-6).all()  # falling
    np.testing.assert_array_equal(np.tril(factor, -1), 0)
    np.testing.assert_allclose(np.diag(factor), 1)
    inverse = np.linalg.inv(factor)
    pivots = inverse @ power @ inverse.T
    np.testing.assert_allclose(pivots, np.diag(np.diag(pivots)), atol=1e-4 * power.max())


def test_keys_in_turn_are_what_the_derivation_says():
    """In float64, channel by channel: the target is the channel plus the weighted errors so far."""
    key, query = tiles(shape=(), dim=8)
    rows, options = key.T.copy(), reference.Heed(3)
    order, factor = reference.order_and_factor(query)
    codes, affine = jax.jit(reference.keys_in_turn, static_argnums=3)(rows, order, factor, options)
    got = np.asarray(reference.decoded(codes, affine, options), np.float64)
    errors = np.zeros((8, 64))
    for i, channel in enumerate(np.asarray(order)):
        target = rows[channel] + np.asarray(factor)[:i, i] @ errors[:i]
        fitted = reference.decoded(*reference.fit_row(jnp.asarray(target, jnp.float32), options),
                                   options)  # fmt: skip
        np.testing.assert_allclose(got[channel], fitted, rtol=1e-4, atol=1e-4)
        errors[i] = rows[channel] - got[channel]


def test_the_sum_of_a_tiles_value_errors_is_steered_to_zero():
    value = np.random.default_rng(1).normal(size=(4, 64, 32)).astype(np.float32)
    sums = {}
    for coupling in (0.0, 0.05):
        error = value - decode(encode.heed(tile=64, coupling=coupling), value, "value")
        sums[coupling] = np.linalg.norm(error.sum(1))
        assert relative(value - error, value) < 0.4
    assert sums[0.05] < 0.5 * sums[0.0]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_row_fit_is_no_worse_than_rounding_to_the_extremes(bits):
    rows = np.random.default_rng(2).standard_t(4, size=(50, 64)).astype(np.float32)
    options = reference.Heed(bits)
    fitted = np.asarray(reference.decoded(*reference.fit_row(jnp.asarray(rows), options), options))
    low, high = rows.min(-1, keepdims=True), rows.max(-1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    plain = np.round((rows - low) / step) * step + low
    error, before = ((x - rows) ** 2 for x in (fitted, plain))
    assert (error.sum(-1) <= before.sum(-1) * 1.001 + 1e-6).all()
    assert error.sum() < (0.99 if bits == 4 else 0.9) * before.sum()


def test_no_queries_or_zero_queries_still_give_finite_keys():
    key, query = tiles(shape=(1,))
    encoder = encode.heed(tile=64)
    plain = decode(encoder, key, "key")
    assert relative(plain, key) < 0.5
    zeros = decode(encoder, key, "key", np.zeros_like(query))
    np.testing.assert_allclose(zeros, plain, atol=1e-5)  # C is a multiple of I: nothing to feed


def test_constant_rows_keep_their_value():
    x = np.full((1, 64, 32), -1.5, np.float32)
    # Values a little less: a rounding error that every token shares is steered against.
    for role, rtol in (("key", 1e-3), ("value", 0.03)):
        np.testing.assert_allclose(run(encode.heed(tile=64), x, role)[2], x, rtol=rtol)


def test_keeps_the_contract(stream):
    check_contract(encode.heed(tile=32), stream, worst=0.5)


def test_bits_are_those_of_plain_rounding():
    encoder = encode.heed()
    assert encoder.bits_per_element("key", 64) == 2.25
    assert encoder.bits_per_element("value", 64) == 2.5
    assert encoder.affine() == encode.rtn(2, 2).affine()
    assert encoder.query_offsets == (0, 128, 256, 512, 1024)
    assert encode.heed(horizon=0).query_offsets == (0,)
    assert encode.heed(feedback=False).query_offsets == ()


def test_what_cannot_be_encoded_raises_with_a_remedy():
    with pytest.raises(ValueError, match="head_dim=96 is no power of two.*use rtn"):
        encode.heed().validate(96)
    with pytest.raises(ValueError, match="horizon=-1 must be 0 or more.*such as 1024"):
        encode.heed(horizon=-1)
    with pytest.raises(ValueError, match=r"coupling=2 must be from 0 \(none\) to 1"):
        encode.heed(coupling=2)
    with pytest.raises(ValueError, match="key_bits=5 is not supported"):
        encode.heed(key_bits=5)
