from dataclasses import dataclass

import numpy as np
import pytest

from kvjax import encode
from kvjax.encode.turboquant_nc import TurboQuantNc
from tests.encode.contract import attention_error, check_contract, peer_tiles, peers, run

PRESETS = {"4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
KINDS = [(64, "gauss"), (64, "const"), (64, "zeros"), (64, "rope"), (128, "small")]
# A token constant over channels rotates to one coordinate; its others are ties, as are zeros.
TIES = {"const": [5, 40, 41], "zeros": [0, 7, 8, *range(32, 64)]}


@dataclass(frozen=True)
class Reference(TurboQuantNc):
    """With vLLM's codebooks, which its integration rule leaves some 2e-3 off."""

    def centroids(self, bits):
        return tuple(float(c) for c in peers()[f"d64/nc/centroids_b{bits}"] * 8)


def codes_of(packed, bits):
    """uint8 [n, D * bits / 8] to codes [n, D]: least significant bits first, over bytes too."""
    stream = np.unpackbits(packed, axis=-1, bitorder="little").reshape(len(packed), -1, bits)
    return (stream << np.arange(bits, dtype=np.uint8)).sum(-1)


def slots(dim, kind, preset):
    """Key codes, norm, value codes, scale and minimum of the first tokens."""
    key_bits, value_bits = PRESETS[preset]
    raw = peers()[f"d{dim}/{kind}/nc/{preset}/slots"]
    key_end = dim * key_bits // 8
    value_end = key_end + 2 + dim * value_bits // 8
    norm, scale, zero = (
        np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16)[:, 0].astype(np.float32)
        for at in (key_end, value_end, value_end + 2)
    )
    key_codes = codes_of(raw[:, :key_end], key_bits)
    value_codes = codes_of(raw[:, key_end + 2 : value_end], value_bits)
    return key_codes, norm, value_codes, scale, zero


def first(x, count):
    """[N, C, ...] to the first tokens [count, ...]."""
    x = np.asarray(x)
    return x.reshape(-1, *x.shape[2:])[:count]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("dim", "kind"), KINDS)
def test_matches_vllm(golden, dim, kind, preset):
    """Byte for byte but for ties and single codes on a border."""
    encoder = Reference(key_bits=PRESETS[preset][0], value_bits=PRESETS[preset][1])
    _, key, key_decoded = run(encoder, peer_tiles(dim, kind, "key"), "key")
    _, value, value_decoded = run(encoder, peer_tiles(dim, kind, "value"), "value")
    key_codes, norm, value_codes, scale, zero = slots(dim, kind, preset)
    there = np.setdiff1d(np.arange(len(norm)), TIES.get(kind, []))
    differ = (first(key["codes"], len(norm)) != key_codes)[there]
    assert differ.mean() < 1e-3
    np.testing.assert_allclose(first(key["norm"], len(norm)), norm, rtol=1e-3)
    assert (first(value["codes"], len(norm)) != value_codes).mean() < 1e-3
    for name, wanted in (("scale", scale), ("zero", zero)):
        np.testing.assert_allclose(first(value[name], len(norm)), wanted, rtol=1e-3, atol=1e-7)
    if kind != "const":  # the tied tokens take part in attention
        wanted = peers()[f"d{dim}/{kind}/nc/{preset}/attn"]
        assert attention_error(golden, dim, kind, key_decoded, value_decoded, wanted) < 1e-3


def test_the_norm_of_a_token_is_kept(stream):
    x = np.asarray(stream[0])[:, :32].swapaxes(1, 2)
    decoded = np.asarray(run(encode.turboquant_nc(4, 4, tile=32), x, "key")[2])
    norms = [np.linalg.norm(y, axis=-1) for y in (decoded, x)]
    np.testing.assert_allclose(*norms, rtol=6e-4)


def test_halves_of_values_go_up():
    x = np.array([[0.0, 0.5, 1.5, 2.5, 7.0, 0, 0, 0]] * 2, np.float32)
    plain = run(encode.turboquant_nc(3, 3, tile=2), x, "value")[1]
    np.testing.assert_array_equal(plain["codes"][0, :5], [0, 1, 2, 3, 7])


def test_keeps_the_contract(stream):
    check_contract(encode.turboquant_nc(4, 4, tile=32), stream, worst=0.13)


def test_bits_per_element():
    for preset, bits in PRESETS.items():
        encoder = encode.turboquant_nc(*bits)
        slot = peers()[f"d128/small/nc/{preset}/slots"].shape[-1]
        assert sum(encoder.tile_bytes(role, 128) for role in ("key", "value")) == 128 * slot
    assert encode.turboquant_nc(3, 3).bits_per_element("key", 64) == 3 + 16 / 64
    assert encode.turboquant_nc(3, 3).bits_per_element("value", 64) == 3 + 32 / 64


def test_what_cannot_be_encoded_raises_with_a_remedy():
    with pytest.raises(ValueError, match="head_dim=80 is no power of two.*rtn or int8"):
        encode.turboquant_nc().validate(80)
    with pytest.raises(ValueError, match="key_bits=8 has no codebook: choose one of"):
        encode.turboquant_nc(key_bits=8)
    with pytest.raises(ValueError, match="value_bits=5 is not supported"):
        encode.turboquant_nc(value_bits=5)
    encode.turboquant_nc(value_bits=8)
