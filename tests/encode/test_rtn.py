from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import encode
from kvjax.ops.rounding import quantize_rows

GOLDEN_KINDS = [
    *[(64, kind) for kind in ("gauss", "tok", "small", "const", "zeros", "rope")],
    *[(128, kind) for kind in ("gauss", "kchan", "small", "zeros")],
]


@partial(jax.jit, static_argnums=(0, 2))
def encode_and_unpack(encoder, x, role):
    tile = encoder.encode_tile(x, role)
    return encoder.unpack_tile(tile, role, x.shape[-1]), encoder.decode_tile(
        tile, role, x.shape[-1]
    )


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("dim", "kind"), GOLDEN_KINDS)
def test_matches_the_reference(golden, dim, kind, bits):
    """Keys: KVarN's row rounding with unit scales. Values: QuaRot per token. Codes are equal."""
    encoder, reference = encode.rtn(bits, bits), f"d{dim}/{kind}/"
    key, key_decoded = encode_and_unpack(encoder, golden.tiles(dim, kind, "key", 128), "key")
    saved = {n: golden.quarot[f"{reference}ch/k{bits}_{n}"][0] for n in ("packed", "a", "z")}
    codes = golden.codes(saved["packed"], bits).reshape(key["codes"].shape)
    np.testing.assert_array_equal(key["codes"], codes)
    np.testing.assert_array_equal(key["scale"], saved["a"].reshape(key["scale"].shape))
    np.testing.assert_array_equal(key["zero"], saved["z"].reshape(key["zero"].shape))

    value, value_decoded = encode_and_unpack(
        encoder, golden.tiles(dim, kind, "value", 128), "value"
    )
    codes = golden.codes(golden.quarot[f"{reference}tok/v{bits}_packed"][0], bits)
    np.testing.assert_array_equal(value["codes"], codes.reshape(value["codes"].shape))
    # The reference keeps float32 scales (of at least 1e-5 / levels), and minus the zero.
    scale = golden.quarot[f"{reference}tok/v{bits}_scale"].reshape(value["scale"].shape)
    np.testing.assert_allclose(value["scale"], scale, rtol=5e-4, atol=1e-5)
    zero = -golden.quarot[f"{reference}tok/v_zero"].reshape(value["zero"].shape)
    np.testing.assert_allclose(value["zero"], zero, rtol=5e-4, atol=1e-7)

    attention = golden.attention(dim, kind, key_decoded, value_decoded)
    wanted = golden.quarot[f"{reference}attn_ch{bits}"][0]
    assert np.linalg.norm(attention - wanted) < 2e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_no_value_is_further_than_half_a_step(bits):
    rows = jnp.asarray(np.random.default_rng(bits).normal(size=(3, 16, 40)), jnp.float32)
    codes, scale, zero = quantize_rows(rows, bits)
    assert int(codes.min()) == 0 and int(codes.max()) == 2**bits - 1
    error = jnp.abs(codes * scale + zero - rows)
    assert bool((error <= scale * 0.5001).all())
    # The ends of every row are kept.
    np.testing.assert_allclose(error.min(axis=-1), 0.0, atol=1e-5)


def test_halves_round_to_even():
    rows = jnp.asarray([[0.0, 0.5, 1.5, 2.5, 3.0]])
    np.testing.assert_array_equal(quantize_rows(rows, 2)[0], [[0, 0, 2, 2, 3]])


def test_codes_come_from_the_scale_before_it_is_rounded_to_sixteen_bits():
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64, 32)), jnp.float32)
    codes, scale, _ = quantize_rows(rows, 8)
    unpacked, _ = encode_and_unpack(encode.rtn(8, 8, tile=64, meta_dtype="bfloat16"), rows, "value")
    np.testing.assert_array_equal(unpacked["codes"], codes)
    assert not np.array_equal(unpacked["scale"], scale[..., 0])


def test_keys_share_a_scale_by_channel_and_values_by_token():
    x = jnp.ones((32, 8)).at[:, 3].set(jnp.arange(32.0)).at[5].mul(2.0)
    encoder = encode.rtn(4, 4, tile=32)
    key, _ = encode_and_unpack(encoder, x, "key")
    value, _ = encode_and_unpack(encoder, x, "value")
    assert key["codes"].shape == (8, 32) and key["scale"].shape == (8,)
    assert value["codes"].shape == (32, 8) and value["scale"].shape == (32,)
    assert int(np.argmax(key["scale"])) == 3 and int(np.argmax(value["scale"])) == 31


@pytest.mark.parametrize(("bits", "dim"), [(2, 8), (2, 80), (3, 20), (3, 80), (4, 20), (8, 6)])
def test_head_dims_that_fill_no_whole_word(bits, dim):
    x = np.random.default_rng(dim).normal(size=(1, 1, 32, dim)).astype(np.float32)
    encoder = encode.rtn(bits, bits, tile=32)
    tile = jax.jit(encoder.encode_tile, static_argnums=1)(x, "key")
    assert sum(leaf.nbytes for leaf in tile.values()) == encoder.tile_bytes("key", dim)
    _, decoded = encode_and_unpack(encoder, x, "key")
    step = (x.max(axis=-2) - x.min(axis=-2)) / (2**bits - 1)
    assert (np.abs(decoded - x) <= 0.6 * step[..., None, :]).all()


def test_bits_per_element():
    encoder = encode.rtn(4, 2)
    assert encoder.bits_per_element("key", 128) == 4 + 32 / 128
    assert encoder.bits_per_element("value", 64) == 2 + 32 / 64


@pytest.mark.parametrize("bits", [0, 5, 6, 7, 16, -1])
def test_other_widths_raise_naming_the_field(bits):
    with pytest.raises(ValueError, match=f"key_bits={bits} is not supported: choose one of"):
        encode.rtn(key_bits=bits)
    with pytest.raises(ValueError, match=f"value_bits={bits} is not supported"):
        encode.rtn(value_bits=bits)


def test_unknown_meta_dtype_raises():
    with pytest.raises(ValueError, match="meta_dtype='float32' is not supported"):
        encode.rtn(meta_dtype="float32")
