import numpy as np
import pytest

from kvjax import encode
from tests.encode.contract import attention_error, check_contract, peer_tiles, peers, run

KINDS = [(64, "gauss"), (64, "const"), (64, "zeros"), (64, "rope"), (128, "small")]


def reference(golden, dim, kind, role, bits):
    """Codes [R, M], scale and zero [R, M / 32] of all tokens of head 0."""
    saved, letter = f"d{dim}/{kind}/kivi/", role[0]
    words = np.ascontiguousarray(peers()[f"{saved}{letter}{bits}_code"])
    codes = golden.codes(words.view(np.uint8), bits)
    return codes, peers()[f"{saved}{letter}{bits}_scale"], peers()[f"{saved}{letter}_mn"]


def whole(plain, role):
    """Ours, tiles [N, R, ...] put together: the rows of keys go on, values have more of them."""
    plain = np.asarray(plain)
    if role == "key":
        return plain.swapaxes(0, 1).reshape(plain.shape[1], -1)
    return plain.reshape(-1, plain.shape[-1])


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("dim", "kind"), KINDS)
def test_matches_the_reference(golden, dim, kind, bits):
    """Codes are equal; scales and minima to 16 bits, in which KIVI keeps them too."""
    decoded = {}
    for role in ("key", "value"):
        _, plain, decoded[role] = run(encode.kivi(bits, bits), peer_tiles(dim, kind, role), role)
        codes, scale, zero = reference(golden, dim, kind, role, bits)
        np.testing.assert_array_equal(whole(plain["codes"], role), codes)
        size = np.abs(peers()[f"d{dim}/{kind}/{role[0]}"].astype(np.float32)).max()
        for got, wanted in ((plain["scale"], scale), (plain["zero"], zero)):
            np.testing.assert_allclose(whole(got, role), wanted, rtol=5e-4, atol=1e-6 * size)
    wanted = peers()[f"d{dim}/{kind}/kivi/attn{bits}"]
    assert attention_error(golden, dim, kind, decoded["key"], decoded["value"], wanted) < 5e-3


def test_a_group_without_range_keeps_its_value():
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    x[32:, 5], x[7, :32] = 1.5, -2.0
    for role, where in (("key", np.s_[32:, 5]), ("value", np.s_[7, :32])):
        decoded = np.asarray(run(encode.kivi(tile=64), x, role)[2])
        np.testing.assert_array_equal(decoded[where], x[where])


def test_an_outlier_costs_its_group_only(stream):
    x = np.asarray(stream[0])[:, :64].swapaxes(1, 2).copy()
    plain = np.asarray(run(encode.kivi(4, 4, tile=64), x, "key")[2])
    x[:, :, 3, 9] = 1e3
    spoilt = np.asarray(run(encode.kivi(4, 4, tile=64), x, "key")[2])
    same = np.ones(x.shape, bool)
    same[:, :, :32, 9] = False
    np.testing.assert_array_equal(spoilt[same], plain[same])
    assert np.abs(spoilt - plain)[:, :, :32, 9].max() > 10


def test_keeps_the_contract(stream):
    check_contract(encode.kivi(2, 2, tile=32, group=16), stream, worst=0.4)


def test_bits_and_layout():
    encoder = encode.kivi()
    for dim in (64, 128):
        assert encoder.bits_per_element("key", dim) == encoder.bits_per_element("value", dim) == 3
    assert encode.kivi(4, 4, group=64).bits_per_element("key", 64) == 4.5
    tile = run(encode.kivi(2, 2, tile=64), np.zeros((64, 64), np.float32), "key")[0]
    assert {name: leaf.shape for name, leaf in tile.items()} == {
        "codes": (4, 64),
        "affine": (2, 64),
    }


def test_what_cannot_be_encoded_raises_with_a_remedy():
    with pytest.raises(ValueError, match="tile=48 is not a multiple of group=32.*such as 128"):
        encode.kivi(tile=48)
    with pytest.raises(ValueError, match="head_dim=80 is not a multiple of group=32.*or use rtn"):
        encode.kivi().validate(80)
    encode.kivi(group=16).validate(80)
    with pytest.raises(ValueError, match="group=1 must be at least 2"):
        encode.kivi(group=1)
    with pytest.raises(ValueError, match="value_bits=6 is not supported"):
        encode.kivi(value_bits=6)
