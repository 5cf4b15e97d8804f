"""What holds for every encoder: shapes, bytes, streaming, and inputs that break naive ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax import encode
from kvjax.encode.base import Encoder, Tiles

ENCODERS = {
    "int8": encode.int8(tile=32),
    "rtn": encode.rtn(3, 4, tile=32, meta_dtype="bfloat16"),
    "kvarn": encode.kvarn(2, 4, tile=32),
}
every_encoder = pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)

# Largest relative error by width.
WORST_ERROR = {2: 0.6, 3: 0.3, 4: 0.15, 8: 0.02}


def tiles_of(encoder, x):
    """[B, S, K, D] to a list of tiles [B, K, C, D]."""
    starts = range(0, x.shape[1], encoder.tile)
    return [x[:, s : s + encoder.tile].swapaxes(1, 2) for s in starts]


@partial(jax.jit, static_argnums=(0, 2))
def encode_tile(encoder, x, role):
    return encoder.encode_tile(x, role)


@partial(jax.jit, static_argnums=(0, 2))
def decode_tile(encoder, tile, role):
    return encoder.unrotate(encoder.decode_tile(tile, role, 64), role)


def round_trip(encoder, x, role):
    """One tile [2, 2, 32, 64] encoded and decoded."""
    return np.asarray(decode_tile(encoder, encode_tile(encoder, x, role), role))


@every_encoder
def test_streaming_equals_one_shot_bit_for_bit(encoder, stream):
    tiles = encoder.encode(*stream)
    for role, x, whole in (("key", stream[0], tiles.key), ("value", stream[1], tiles.value)):
        for n, x_tile in enumerate(tiles_of(encoder, x)):
            for name, leaf in encode_tile(encoder, x_tile, role).items():
                np.testing.assert_array_equal(leaf, whole[name][:, :, n], err_msg=f"{role} {name}")


@every_encoder
def test_a_flush_inside_a_larger_program_gives_the_same_bits(encoder, stream):
    """As a cache flushes: out of a buffer, inside a branch, into an array of tiles."""

    def flush(buffer, stored, full):
        def store():
            tile = encoder.encode_tile(buffer[:, :, 8 : 8 + encoder.tile] * 2.0, "key")
            return {name: stored[name].at[:, :, 1].set(leaf) for name, leaf in tile.items()}

        return lax.cond(full, store, lambda: stored)

    buffer = stream[0].swapaxes(1, 2)
    tile = encode_tile(encoder, buffer[:, :, 8 : 8 + encoder.tile] * 2.0, "key")
    empty = {name: jnp.stack([leaf * 0] * 3, axis=2) for name, leaf in tile.items()}
    stored = jax.jit(flush)(buffer, empty, True)
    for name, leaf in tile.items():
        np.testing.assert_array_equal(stored[name][:, :, 1], leaf, err_msg=name)
        assert not np.asarray(stored[name][:, :, ::2]).any()


@every_encoder
def test_bytes_are_those_of_the_arrays(encoder, stream):
    tiles = encoder.encode(*stream)
    for role, tile in (("key", tiles.key), ("value", tiles.value)):
        shape, dim = stream[0].shape, stream[0].shape[-1]
        num_tiles = shape[0] * shape[1] * shape[2] // encoder.tile
        measured = sum(leaf.nbytes for leaf in tile.values())
        assert measured == num_tiles * encoder.tile_bytes(role, dim)
        assert measured * 8 == pytest.approx(encoder.bits_per_element(role, dim) * stream[0].size)
        assert measured < stream[0].nbytes / 2
    assert tiles.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(tiles))


@every_encoder
def test_buffers_have_the_dtypes_they_claim(encoder, stream):
    tiles = encoder.encode(*stream)
    for tile in (tiles.key, tiles.value):
        wanted = {"codes": jnp.int32, "affine": jnp.int32, "column": jnp.int32}
        if isinstance(encoder, type(encode.int8())):
            wanted = {"codes": jnp.int8, "scale": jnp.float32}
        assert {name: leaf.dtype for name, leaf in tile.items()} == {n: wanted[n] for n in tile}


@every_encoder
def test_decode_is_close_but_not_lossless(encoder, stream):
    decoded = encoder.decode(encoder.encode(*stream))
    for role, x, y in zip(("key", "value"), stream, decoded, strict=True):
        assert y.shape == x.shape and y.dtype == jnp.float32
        error = float(jnp.linalg.norm(y - x) / jnp.linalg.norm(x))
        bits = getattr(encoder, f"{role}_bits", 8)
        assert 1e-4 < error < WORST_ERROR[bits], role


@every_encoder
def test_decode_works_on_tiles_with_any_leading_axes(encoder, stream):
    tiles = encoder.encode(*stream)
    many = decode_tile(encoder, tiles.key, "key")
    one = decode_tile(encoder, {n: leaf[1, 0, 2] for n, leaf in tiles.key.items()}, "key")
    assert many.shape == (2, 2, 4, 32, 64)
    np.testing.assert_allclose(many[1, 0, 2], one, rtol=1e-5, atol=1e-5)


@every_encoder
def test_bfloat16_input_is_encoded_from_its_exact_values(encoder, stream):
    x = tiles_of(encoder, stream[0])[0].astype(jnp.bfloat16)
    half = encode_tile(encoder, x, "key")
    full = encode_tile(encoder, x.astype(jnp.float32), "key")
    for name in full:
        np.testing.assert_array_equal(half[name], full[name])


@every_encoder
@pytest.mark.parametrize("role", ["key", "value"])
def test_zeros_decode_to_exact_zeros(encoder, role):
    assert not round_trip(encoder, jnp.zeros((2, 2, 32, 64)), role).any()


@every_encoder
def test_a_zero_value_token_among_others_stays_zero(encoder, stream):
    x = tiles_of(encoder, stream[1])[0].at[:, :, 7].set(0.0)
    assert not round_trip(encoder, x, "value")[:, :, 7].any()


@every_encoder
@pytest.mark.parametrize("role", ["key", "value"])
def test_constant_tiles_keep_their_value(encoder, role):
    x = jnp.full((2, 2, 32, 64), 1.5)
    np.testing.assert_allclose(round_trip(encoder, x, role), 1.5, rtol=1e-2)


@every_encoder
@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("size", [1e-12, 1e5, 1e30])
def test_tiny_and_huge_tiles_stay_finite(encoder, role, size, stream):
    x = tiles_of(encoder, stream[0])[0] * size
    decoded = round_trip(encoder, x, role)
    assert np.isfinite(decoded).all()
    # Clipping to 16 bits may shrink what is too large for it; nothing may grow or change sign.
    assert np.abs(decoded).max() <= 2.5 * np.abs(x).max()


@every_encoder
def test_a_large_key_bias_leaves_the_other_channels_readable(encoder, stream):
    plain = tiles_of(encoder, stream[0])[0]
    biased = plain.at[..., 9].add(60.0)
    others = np.delete(np.arange(64), 9)
    error = round_trip(encoder, biased, "key") - np.asarray(biased)
    relative = np.linalg.norm(error[..., others]) / np.linalg.norm(plain[..., others])
    # int8 shares one scale between all channels of a token, and pays for it.
    assert relative < (0.15 if encoder == ENCODERS["int8"] else WORST_ERROR[encoder.key_bits])


def test_tiles_pass_through_jit_as_a_pytree(stream):
    encoder = ENCODERS["rtn"]
    tiles = jax.jit(encoder.encode)(*stream)
    assert isinstance(tiles, Tiles) and tiles.encoder == encoder and tiles.dim == 64
    k, v = jax.jit(lambda tiles: tiles.encoder.decode(tiles))(tiles)
    assert np.linalg.norm(k - stream[0]) < 0.3 * np.linalg.norm(stream[0])
    assert np.linalg.norm(v - stream[1]) < 0.15 * np.linalg.norm(stream[1])


@every_encoder
def test_no_tokens_give_no_tiles(encoder):
    empty = jnp.zeros((2, 0, 1, 64))
    tiles = encoder.encode(empty, empty)
    assert tiles.nbytes == 0
    assert encoder.decode(tiles)[0].shape == (2, 0, 1, 64)


@every_encoder
def test_wrong_shapes_and_roles_raise(encoder, stream):
    k, v = stream
    with pytest.raises(ValueError, match="length 40 is not a multiple of tile=32"):
        encoder.encode(k[:, :40], v[:, :40])
    with pytest.raises(ValueError, match=r"must both be \[B, S, K, D\]"):
        encoder.encode(k, v[:, :32])
    with pytest.raises(ValueError, match=r"a tile must be \[..., 32, head_dim\]"):
        encoder.encode_tile(jnp.zeros((1, 1, 31, 64)), "key")
    with pytest.raises(ValueError, match="role='latent' is unknown"):
        encoder.encode_tile(jnp.zeros((1, 1, 32, 64)), "latent")


@pytest.mark.parametrize("tile", [0, -2, 1, 33])
@pytest.mark.parametrize("factory", [encode.int8, encode.rtn, encode.kvarn])
def test_impossible_tiles_raise(factory, tile):
    with pytest.raises(ValueError, match=f"tile={tile} must be an even number"):
        factory(tile=tile)


@every_encoder
def test_encoders_are_hashable_values(encoder):
    assert isinstance(encoder, Encoder)
    assert len({encoder, type(encoder)(**vars(encoder))}) == 1
