from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.ops import packing


def codes_of(rows, minor, bits, lead=(), seed=0):
    rng = np.random.default_rng([rows, minor, bits, seed])
    return rng.integers(0, 2**bits, (*lead, rows, minor))


@partial(jax.jit, static_argnums=1)
def pack_and_unpack(codes, bits):
    packed = packing.pack(codes, bits)
    return packed, packing.unpack(packed, bits, codes.shape[-2])


@settings(max_examples=15)
@given(
    bits=st.sampled_from(packing.WIDTHS),
    rows=st.integers(1, 140),
    minor=st.integers(1, 5),
    lead=st.sampled_from([(), (2,), (1, 3)]),
)
def test_round_trip(bits, rows, minor, lead):
    codes = codes_of(rows, minor, bits, lead)
    packed, unpacked = pack_and_unpack(codes, bits)
    assert packed.dtype == jnp.int32
    assert packed.shape == (*lead, packing.words(rows, bits), minor)
    np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize("rows", [8, 20, 64, 80, 128])
@pytest.mark.parametrize("bits", packing.WIDTHS)
def test_round_trip_at_the_sizes_of_heads(bits, rows):
    codes = codes_of(rows, 8, bits)
    np.testing.assert_array_equal(pack_and_unpack(codes, bits)[1], codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_layout_is_byte_planar(bits):
    codes = codes_of(128, 3, bits)
    packed = np.asarray(packing.pack(jnp.asarray(codes), bits)).astype(np.int64)
    num_words = 128 * bits // 32
    for j in range(8 // bits):
        for r in range(num_words):
            for byte in range(4):
                code = packed[r] >> (8 * byte + bits * j) & (2**bits - 1)
                np.testing.assert_array_equal(code, codes[j * 4 * num_words + 4 * r + byte])


def test_three_bits_are_two_low_bits_then_the_high_bit():
    codes = jnp.asarray(codes_of(64, 3, 3))
    packed = packing.pack(codes, 3)
    np.testing.assert_array_equal(packed[:4], packing.pack(codes & 3, 2))
    np.testing.assert_array_equal(packed[4:], packing.pack(codes >> 2, 1))


def test_a_tile_of_128_by_128_two_bit_codes_is_one_register():
    assert packing.pack(jnp.zeros((128, 128), jnp.int32), 2).shape == (8, 128)


@pytest.mark.parametrize("bits", [0, 5, 6, 7, 16])
def test_other_widths_raise(bits):
    with pytest.raises(ValueError, match=f"bits={bits}"):
        packing.pack(jnp.zeros((8, 8), jnp.int32), bits)
    with pytest.raises(ValueError, match=f"bits={bits}"):
        packing.unpack(jnp.zeros((8, 8), jnp.int32), bits, 8)


@pytest.mark.parametrize("meta_dtype", packing.META_DTYPES)
def test_pairs_keep_their_sixteen_bits(meta_dtype):
    rng = np.random.default_rng(0)
    high, low = rng.normal(size=(2, 3, 10)).astype(np.float32) * 100
    packed = packing.pack_pair(jnp.asarray(high), jnp.asarray(low), meta_dtype)
    assert packed.dtype == jnp.int32 and packed.shape == (3, 10)
    for got, put in zip(packing.unpack_pair(packed, meta_dtype), (high, low), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, put.astype(jnp.dtype(meta_dtype)).astype(np.float32))


def test_the_scale_is_the_high_half():
    packed = packing.pack_pair(jnp.float32(1.0), jnp.float32(-2.0), "bfloat16")
    assert int(packed) == 0x3F80C000 - (1 << 32 if 0x3F80C000 >> 31 else 0)
    high = jax.lax.bitcast_convert_type(packed & np.int32(-65536), jnp.float32)
    low = jax.lax.bitcast_convert_type(packed << 16, jnp.float32)
    assert (high, low) == (1.0, -2.0)


@pytest.mark.parametrize(("meta_dtype", "largest"), [("float16", 65504.0), ("bfloat16", 3.39e38)])
def test_what_does_not_fit_is_clipped_to_finite(meta_dtype, largest):
    value = jnp.asarray([1e5, -1e5, 3.402e38, -3.402e38], jnp.float32)
    high, low = packing.unpack_pair(packing.pack_pair(value, value, meta_dtype), meta_dtype)
    assert np.isfinite(high).all() and np.isfinite(low).all()
    assert high[2] == pytest.approx(largest, rel=1e-3) == -low[3]


def test_halves_pair_an_element_with_the_one_half_way_on():
    vector = jnp.arange(8.0)
    packed = packing.pack_halves(vector, "float16")
    assert packed.shape == (4,)
    high, low = packing.unpack_pair(packed, "float16")
    np.testing.assert_array_equal(high, vector[:4])
    np.testing.assert_array_equal(low, vector[4:])
    np.testing.assert_array_equal(packing.unpack_halves(packed, "float16"), vector)


def test_unknown_meta_dtype_raises():
    with pytest.raises(ValueError, match="meta_dtype='float32'"):
        packing.check_meta_dtype("float32")
