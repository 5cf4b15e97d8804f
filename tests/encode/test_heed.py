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


def test_power_mixes_queries_and_keys_and_its_factor_rebuilds_it():
    key, query = tiles(shape=())
    options = reference.Heed(2, own_share=0.25)
    power = reference.score_power(jnp.asarray(key.T), jnp.asarray(query), options)
    moments = [query.astype(np.float64).T @ query, np.cov(key.T.astype(np.float64))]
    moments = [m / (np.trace(m) / 32) for m in moments]
    wanted = 0.75 * moments[0] + 0.25 * moments[1] + reference.DAMPING * np.eye(32)
    np.testing.assert_allclose(power, wanted, rtol=1e-4, atol=1e-4)
    order, turned, factor = (np.asarray(x, np.float64) for x in reference.order_and_factor(power))
    np.testing.assert_allclose(turned, wanted[order.astype(int)][:, order.astype(int)], atol=1e-4)
    assert (np.diff(np.diag(turned)) <= 1e-6).all()  # falling
    np.testing.assert_array_equal(np.tril(factor, -1), 0)
    np.testing.assert_allclose(np.diag(factor), 1)
    inverse = np.linalg.inv(factor)
    pivots = inverse @ turned @ inverse.T
    np.testing.assert_allclose(pivots, np.diag(np.diag(pivots)), atol=1e-4 * turned.max())


@pytest.mark.parametrize("sweeps", [0, 1])
def test_keys_in_turn_are_what_the_derivation_says(sweeps):
    """Channel by channel in float64: first the errors before it, then those of all the others."""
    key, query = tiles(shape=(), dim=8)
    rows, options = key.T.copy(), reference.Heed(3, sweeps=sweeps)
    power = reference.score_power(jnp.asarray(rows), jnp.asarray(query), options)
    in_turn = jax.jit(reference.keys_in_turn, static_argnums=2)
    codes, affine = in_turn(rows, power, options)
    got = np.asarray(reference.decoded(codes, affine, options), np.float64)
    order, turned, factor = (np.asarray(x) for x in reference.order_and_factor(power))
    errors, held = np.zeros((8, 64)), {}
    for again in range(sweeps + 1):
        for i, channel in enumerate(order):
            pull = turned[i] / turned[i, i] if again else factor[:, i]
            pull = np.where(np.arange(8) == i, 0, pull)
            target = jnp.asarray(rows[channel] + pull @ errors, jnp.float32)
            if again:
                fitted = reference.refit_row(target, held[i], options)
            else:
                fitted = reference.fit_row(target, options)
            held[i] = fitted[1]
            errors[i] = rows[channel] - np.asarray(reference.decoded(*fitted, options))
    np.testing.assert_allclose(got[order], rows[order] - errors, rtol=1e-4, atol=1e-4)


def test_sweeps_never_make_the_weighted_error_larger_by_much():
    key, query = tiles(shape=(4,))
    errors = [score_error(encode.heed(tile=64, sweeps=n, own_share=0.0), key, query)
              for n in (0, 1, 3)]  # fmt: skip
    assert errors[1] < 0.97 * errors[0] and errors[2] <= 1.01 * errors[1]


def test_the_sum_of_a_tiles_value_errors_is_steered_to_zero():
    value = np.random.default_rng(1).normal(size=(4, 64, 32)).astype(np.float32)
    sums = {}
    for coupling in (0.0, 0.05):
        error = value - decode(encode.heed(tile=64, coupling=coupling), value, "value")
        sums[coupling] = np.linalg.norm(error.sum(1))
        assert relative(value - error, value) < 0.4
    assert sums[0.05] < 0.6 * sums[0.0]


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
    zeros = np.zeros_like(query)
    alone = dataclasses.replace(encoder, own_share=0.0)
    # C is a multiple of I: nothing to feed, and a sweep only refits.
    assert relative(decode(alone, key, "key", zeros), key) <= 1.001 * relative(plain, key)
    assert relative(decode(encoder, key, "key", zeros), key) < 0.5


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
    assert encoder.reads_queries and not encode.heed(feedback=False).reads_queries


def test_what_cannot_be_encoded_raises_with_a_remedy():
    with pytest.raises(ValueError, match="head_dim=96 is no power of two.*use rtn"):
        encode.heed().validate(96)
    with pytest.raises(ValueError, match="sweeps=-1 must be 0 or more, such as 2"):
        encode.heed(sweeps=-1)
    with pytest.raises(ValueError, match="own_share=2 must be from 0 to 1"):
        encode.heed(own_share=2)
    with pytest.raises(ValueError, match=r"coupling=2 must be from 0 \(none\) to 1"):
        encode.heed(coupling=2)
    with pytest.raises(ValueError, match="key_bits=5 is not supported"):
        encode.heed(key_bits=5)
