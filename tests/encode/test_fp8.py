import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import encode
from tests.encode.contract import attention_error, check_contract, peer_tiles, peers, run

KINDS = [(64, "gauss"), (64, "const"), (64, "zeros"), (64, "rope"), (128, "small")]


@pytest.mark.parametrize(("dim", "kind"), KINDS)
def test_matches_the_reference(golden, dim, kind):
    decoded = {}
    for role in ("key", "value"):
        tile, _, decoded[role] = run(encode.fp8(), peer_tiles(dim, kind, role), role)
        name = f"d{dim}/{kind}/fp8/{role[0]}"
        np.testing.assert_allclose(tile["scale"].ravel(), peers()[name + "_scale"], rtol=1e-6)
        bits, wanted = np.asarray(tile["codes"]).view(np.uint8).reshape(-1, dim), peers()[name]
        differ = np.abs(bits[: len(wanted)].astype(int) - wanted)
        assert differ.max() <= 1 and (differ != 0).mean() < 1e-3
    wanted = peers()[f"d{dim}/{kind}/fp8/attn"]
    assert attention_error(golden, dim, kind, decoded["key"], decoded["value"], wanted) < 1e-5


def test_the_cast_rounds_once_to_even():
    x = peers()["fp8_probe_in"].copy()
    probe = np.zeros((2, 24), np.float32)
    probe[0, :23], probe[1, 0] = x, 448.0
    assert np.abs(probe).max(axis=-1).tolist() == [448.0, 448.0]  # so that the scale is 1
    tile = run(encode.fp8(tile=2), probe, "key")[0]
    np.testing.assert_array_equal(tile["scale"], 1.0)
    codes = np.asarray(tile["codes"])[0, :23].view(np.uint8)
    np.testing.assert_array_equal(codes, peers()["fp8_probe_bits"])


def test_the_largest_number_is_kept_not_turned_into_nan():
    x = np.array([[3.3e38, -3.3e38], [1e-3, 7e-4]], np.float32)
    for form in ("e4m3", "e5m2"):
        decoded = run(encode.fp8(tile=2, format=form), x, "value")[2]
        np.testing.assert_allclose(decoded, x, rtol=0.07 if form == "e4m3" else 0.13)


def test_a_zero_token_has_a_positive_scale_and_decodes_to_exact_zeros():
    x = np.ones((4, 8), np.float32)
    x[2] = 0.0
    tile, _, decoded = run(encode.fp8(tile=4), x, "value")
    assert float(tile["scale"].min()) == pytest.approx(1e-6)
    np.testing.assert_array_equal(decoded[2], 0.0)
    np.testing.assert_allclose(decoded[1], 1.0, rtol=1e-6)


@pytest.mark.parametrize(("form", "worst"), [("e4m3", 0.04), ("e5m2", 0.08)])
def test_keeps_the_contract(stream, form, worst):
    encoder = encode.fp8(tile=32, format=form)
    check_contract(encoder, stream, worst)
    assert encoder.bits_per_element("key", 64) == 8.5
    wanted = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[form]
    x = np.asarray(stream[0])[:, :32].swapaxes(1, 2)
    assert run(encoder, x, "key")[0]["codes"].dtype == wanted


def test_other_formats_raise():
    with pytest.raises(ValueError, match="format='e3m4' is unknown: choose one of"):
        encode.fp8(format="e3m4")
    with pytest.raises(ValueError, match="tile=7 must be an even number"):
        encode.fp8(tile=7)
