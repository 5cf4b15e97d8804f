import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import encode

KINDS = [(64, "gauss"), (64, "zeros"), (64, "const"), (64, "rope"), (128, "kchan")]


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize(("dim", "kind"), KINDS)
def test_matches_the_reference(golden, dim, kind, role):
    name = f"d{dim}/{kind}/{role[0]}"
    x, codes = golden.int8[name], golden.int8[name + "_int8"]
    encoder = encode.int8(tile=len(x))
    tile = jax.jit(encoder.encode_tile, static_argnums=1)(x, role)
    assert tile["codes"].dtype == jnp.int8
    scale = golden.int8[name + "_int8_scale"]
    np.testing.assert_allclose(tile["scale"], scale, rtol=1e-6)
    differ = np.asarray(tile["codes"], np.int32) - codes
    assert np.abs(differ).max() <= 1 and (differ != 0).mean() < 1e-3
    decoded = np.asarray(encoder.decode_tile(tile, role, dim))
    wanted = codes * scale[:, None]
    np.testing.assert_allclose(decoded[differ == 0], wanted[differ == 0], rtol=1e-6)


def test_codes_are_rounded_not_truncated():
    x = jnp.asarray([[127.0, 0.6, -0.6, 1.4, -1.6], [127.0, 0.5, 1.5, -0.5, 0.0]])
    tile = encode.int8(tile=2).encode_tile(x, "key")
    np.testing.assert_array_equal(tile["codes"], [[127, 1, -1, 1, -2], [127, 0, 2, 0, 0]])


def test_a_zero_token_has_a_positive_scale_and_decodes_to_exact_zeros():
    x = jnp.ones((4, 8)).at[2].set(0.0)
    encoder = encode.int8(tile=4)
    tile = encoder.encode_tile(x, "value")
    assert float(tile["scale"].min()) == pytest.approx(1e-6)
    decoded = encoder.decode_tile(tile, "value", 8)
    np.testing.assert_array_equal(decoded[2], 0.0)
    np.testing.assert_allclose(decoded[1], 1.0, rtol=1e-6)


def test_the_scale_is_the_tokens_own():
    x = jnp.stack([jnp.full(8, 3.0), jnp.full(8, 300.0)])
    tile = encode.int8(tile=2).encode_tile(x, "key")
    np.testing.assert_allclose(tile["scale"], [3 / 127, 300 / 127], rtol=1e-6)
    np.testing.assert_array_equal(tile["codes"], 127)


def test_bits_per_element():
    assert encode.int8().bits_per_element("key", 128) == 8.25
    assert encode.int8().bits_per_element("value", 64) == 8.5
