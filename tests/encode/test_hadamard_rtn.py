from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import encode
from kvjax.encode.hadamard_rtn import HadamardRtn
from tests.encode.contract import check_contract, peers, run, turn


@dataclass(frozen=True)
class Turned(HadamardRtn):
    """Takes its input as rotated already: the reference rounds what float16 made of it."""

    def rotate(self, x, role):
        return x

    def unrotate(self, x, role):
        return x


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("dim", "kind"), [(64, "gauss"), (64, "zeros"), (64, "rope"), (128, "kchan")]
)
def test_keys_per_token_match_quarot(golden, dim, kind, bits):
    """Codes are equal, scales to 16 bits (the reference has float32, at least 1e-5 / levels)."""
    name = f"d{dim}/{kind}/tok/"
    encoder = Turned(key_bits=bits, value_bits=bits, key_axis="token")
    _, plain, key = run(encoder, golden.tiles(dim, kind, "key", 128), "key")
    codes = golden.codes(peers()[f"{name}k{bits}_packed"], bits)  # of the first head
    np.testing.assert_array_equal(plain["codes"].reshape(-1, dim)[: len(codes)], codes)
    scale = peers()[f"{name}k{bits}_scale"]
    np.testing.assert_allclose(plain["scale"].reshape(-1)[:256], scale, rtol=5e-4, atol=1e-5)
    zero = -peers()[f"{name}k_zero"]
    np.testing.assert_allclose(plain["zero"].reshape(-1)[:256], zero, rtol=5e-4, atol=1e-7)

    _, _, value = run(encoder, golden.tiles(dim, kind, "value", 128), "value")
    wanted = peers()[f"{name}attn{bits}"]
    attention = golden.attention(dim, kind, key, value)[:4]
    assert np.linalg.norm(attention - wanted) < 5e-3 * np.linalg.norm(wanted)


def test_keys_per_channel_are_rtn_after_the_rotation(stream):
    x = np.asarray(stream[0])[:, :32].swapaxes(1, 2)
    encoder, plain = encode.hadamard_rtn(2, 4, tile=32), encode.rtn(2, 4, tile=32)
    tile, ours, _ = run(encoder, x, "key")
    wanted_tile, wanted, _ = run(plain, turn(encoder, x, "key")[0], "key")
    # The product may round otherwise in another program, and the codes with it.
    assert (np.asarray(ours["codes"]) == np.asarray(wanted["codes"])).mean() > 0.999
    np.testing.assert_allclose(ours["scale"], wanted["scale"], rtol=2e-3)
    for name, leaf in wanted_tile.items():
        assert tile[name].shape == leaf.shape and tile[name].dtype == leaf.dtype


def test_the_rotation_spares_a_token_its_outlier_channel(stream):
    x = np.asarray(stream[0])[:, :32].swapaxes(1, 2)  # channel 5 is ten times the others
    turned = run(encode.hadamard_rtn(4, 4, tile=32, key_axis="token"), x, "key")[2]
    unturned = run(encode.rtn(4, 4, tile=32), x, "value")[2]  # per token
    assert np.linalg.norm(turned - x) < 0.8 * np.linalg.norm(unturned - x)


@pytest.mark.parametrize("key_axis", ["channel", "token"])
def test_keeps_the_contract(stream, key_axis):
    check_contract(encode.hadamard_rtn(4, 4, tile=32, key_axis=key_axis), stream, worst=0.15)


def test_bits_per_element():
    by_channel, by_token = (
        encode.hadamard_rtn(2, 2, key_axis=axis) for axis in ("channel", "token")
    )
    assert by_channel.bits_per_element("key", 64) == 2 + 32 / 128
    assert by_token.bits_per_element("key", 64) == by_token.bits_per_element("value", 64) == 2.5


def test_what_cannot_be_encoded_raises_with_a_remedy():
    with pytest.raises(ValueError, match="head_dim=80 is no power of two.*rtn or int8"):
        encode.hadamard_rtn().validate(80)
    with pytest.raises(ValueError, match="head_dim=96 is no power of two"):
        encode.hadamard_rtn(tile=32).encode_tile(jnp.zeros((32, 96)), "key")
    with pytest.raises(ValueError, match="key_axis='head' is unknown: choose one of"):
        encode.hadamard_rtn(key_axis="head")
    with pytest.raises(ValueError, match="key_bits=5 is not supported"):
        encode.hadamard_rtn(key_bits=5)
    with pytest.raises(ValueError, match="tile=33 must be an even number"):
        encode.hadamard_rtn(tile=33)
