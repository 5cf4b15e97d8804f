import numpy as np
import pytest

from kvjax import encode
from tests.encode.contract import check_contract, run


def test_codes_are_symmetric_and_rounded():
    x = np.array([[7.0, 0.6, -0.6, 1.4, -7.0], [3.5, 0.25, 0.75, -0.25, 0.0]], np.float32)
    tile, plain, decoded = run(encode.int4(tile=2), x, "key")
    np.testing.assert_array_equal(plain["codes"], [[7, 1, -1, 1, -7], [7, 0, 2, 0, 0]])
    np.testing.assert_array_equal(plain["scale"], [1.0, 0.5])
    np.testing.assert_array_equal(decoded, [[7, 1, -1, 1, -7], [3.5, 0, 1, 0, 0]])
    assert tile["codes"].shape == (1, 2) and tile["scale"].shape == (1,)  # padded to one word


@pytest.mark.parametrize(("role", "shape"), [("key", (8, 32)), ("value", (4, 64))])
def test_no_number_is_further_than_half_a_step(stream, role, shape):
    x = np.asarray(stream[0])[:, :32].swapaxes(1, 2)
    tile, plain, decoded = run(encode.int4(tile=32), x, role)
    step = np.abs(x).max(axis=-1, keepdims=True) / 7
    assert (np.abs(decoded - x) <= step * 0.503).all()  # half, and the step in 16 bits
    assert int(plain["codes"].min()) >= -7 and int(plain["codes"].max()) == 7
    assert tile["codes"].shape == (2, 2, *shape)


def test_a_zero_token_has_a_positive_scale_and_decodes_to_exact_zeros():
    x = np.ones((4, 8), np.float32)
    x[2] = 0.0
    _, plain, decoded = run(encode.int4(tile=4), x, "value")
    assert float(plain["scale"].min()) > 0
    np.testing.assert_array_equal(decoded[2], 0.0)
    np.testing.assert_allclose(decoded[1], 1.0, rtol=1e-3)


@pytest.mark.parametrize(("meta_dtype", "largest"), [("float16", 65504 * 7), ("bfloat16", 3e38)])
def test_a_scale_beyond_sixteen_bits_is_clipped(meta_dtype, largest):
    x = np.full((2, 8), 3e38, np.float32)
    decoded = run(encode.int4(tile=2, meta_dtype=meta_dtype), x, "key")[2]
    np.testing.assert_allclose(decoded, largest, rtol=5e-3)


def test_keeps_the_contract(stream):
    check_contract(encode.int4(tile=32), stream, worst=0.4)


def test_bits_per_element():
    assert encode.int4().bits_per_element("key", 128) == 4.125
    assert encode.int4().bits_per_element("value", 64) == 4.25
    assert encode.int4().tile_bytes("key", 20) == 4 * 3 * 128 + 256  # 20 rows in 3 words


def test_what_cannot_be_encoded_raises():
    with pytest.raises(ValueError, match="tile=7 must be an even number"):
        encode.int4(tile=7)
    with pytest.raises(ValueError, match="meta_dtype='float32' is not supported"):
        encode.int4(meta_dtype="float32")
