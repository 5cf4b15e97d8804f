import numpy as np
import pytest

from kvjax import encode
from kvjax.encode.oscar import quantize_whole_zero
from tests.encode.contract import attention_error, check_contract, peer_tiles, peers, relative, run


def heads_of(dim, kind, role):
    """Both heads of d64/gauss [2 tiles, 2 heads, 128, 64] for keys; other inputs have one."""
    tiles = peer_tiles(dim, kind, role)
    if kind != "gauss" or role == "value":
        return tiles[:, None]
    other = peers()["d64/gauss/k_head1"].reshape(tiles.shape)
    return np.stack([tiles, other], axis=1)


@pytest.mark.parametrize("kind", ["gauss", "const"])
def test_keys_match_the_reference(golden, kind):
    """Codes are equal. In groups without range the public code has NaN; ours keep their value."""
    _, plain, _ = run(encode.oscar(), heads_of(64, kind, "key"), "key")
    name = f"d64/{kind}/oscar/k_"
    together = {
        n: np.concatenate(np.asarray(x)[:, 0], axis=-1) for n, x in plain.items()
    }  # head 0, [D, T], [D, T / 32], [T]
    codes = golden.codes(peers()[name + "codes_packed"], 2)
    scale, point = peers()[name + "scale"], peers()[name + "zero"]
    ranged = scale > 1e-10
    assert ranged.mean() == (0.875 if kind == "const" else 1.0)  # 32 equal tokens of 256
    same = together["codes"].reshape(64, 8, 32) == codes.reshape(64, 8, 32)
    assert same[ranged].mean() > 0.9999
    np.testing.assert_allclose(together["norm"], peers()[name + "norm"], rtol=5e-4)
    np.testing.assert_allclose(together["scale"][ranged], scale[ranged], rtol=6e-4)
    zero = (-point * scale)[ranged]
    np.testing.assert_allclose(together["zero"][ranged], zero, rtol=6e-4, atol=1e-7)


def test_decoded_tokens_match_the_reference():
    _, _, key = run(encode.oscar(), heads_of(64, "gauss", "key"), "key")
    _, _, value = run(encode.oscar(), heads_of(64, "gauss", "value"), "value")
    rotated = encode.oscar().rotate(key[0, 0, :64], "key")
    assert relative(rotated, peers()["d64/gauss/oscar/k_deq_rot_64"]) < 1e-3
    assert relative(value[0, 0, :64], peers()["d64/gauss/oscar/v_deq_64"]) < 1e-3


@pytest.mark.parametrize(("dim", "kind"), [(64, "gauss"), (128, "small")])
def test_attention_matches_the_reference(golden, dim, kind):
    key = np.asarray(run(encode.oscar(), heads_of(dim, kind, "key"), "key")[2])[:, 0]
    value = run(encode.oscar(), heads_of(dim, kind, "value"), "value")[2]
    wanted = peers()[f"d{dim}/{kind}/oscar/attn"]
    assert attention_error(golden, dim, kind, key, value, wanted) < 5e-3


def test_a_row_without_range_keeps_its_value():
    rows = np.array(
        [[1.5, 1.5, 1.5, 1.5], [0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]], np.float32
    )
    codes, scale, zero = (np.asarray(x) for x in quantize_whole_zero(rows, 2))
    np.testing.assert_array_equal(codes, [[0] * 4, [0, 1, 2, 3], [0, 1, 2, 3]])
    np.testing.assert_array_equal(codes * scale + zero, rows)


def test_the_norm_spares_a_key_channel_its_large_tokens(stream):
    x = np.asarray(stream[1])[:, :32].swapaxes(1, 2)  # token 3 is eight times the others
    normed = run(encode.oscar(2, 2, tile=32), x, "key")[2]
    plain = run(encode.kivi(2, 2, tile=32), x, "key")[2]
    others = np.arange(32) != 3
    error = [relative(y[:, :, others], x[:, :, others]) for y in (normed, plain)]
    assert error[0] < 0.5 * error[1]


def test_a_head_may_have_its_own_norm():
    x = np.random.default_rng(0).normal(size=(2, 32, 64)).astype(np.float32)
    x[1] *= 30
    joint = run(encode.oscar(tile=32), x, "key")[1]["norm"]
    np.testing.assert_array_equal(joint[0], joint[1])
    own = np.asarray(run(encode.oscar(tile=32, joint_norm=False), x, "key")[1]["norm"])
    np.testing.assert_allclose(own, np.linalg.norm(x, axis=-1), rtol=6e-4)


def test_keeps_the_contract(stream):
    check_contract(encode.oscar(2, 2, tile=32), stream, worst=0.6)


def test_bits_per_element():
    assert encode.oscar().bits_per_element("key", 64) == 3 + 16 / 64
    assert encode.oscar().bits_per_element("value", 64) == 3


def test_what_cannot_be_encoded_raises_with_a_remedy():
    with pytest.raises(ValueError, match="head_dim=96 is no power of two.*rtn or int8"):
        encode.oscar().validate(96)
    with pytest.raises(ValueError, match="head_dim=16 is not a multiple of group=32"):
        encode.oscar().validate(16)
    with pytest.raises(ValueError, match="tile=16 is not a multiple of group=32"):
        encode.oscar(tile=16)
    with pytest.raises(ValueError, match="key_bits=16 is not supported"):
        encode.oscar(key_bits=16)
