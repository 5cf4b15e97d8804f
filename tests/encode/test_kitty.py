from functools import cache

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax import encode
from tests.encode.contract import (
    FOLDER,
    attention_error,
    check_contract,
    peer_tiles,
    relative,
    run,
)

KINDS = [(64, "gauss"), (64, "const"), (64, "zeros"), (64, "rope"), (128, "small")]


@cache
def reference():
    return load_file(FOLDER / "kitty.safetensors")


@pytest.mark.parametrize(("dim", "kind"), KINDS)
def test_matches_the_reference(golden, dim, kind):
    """The same channels are boosted; what decodes is equal to the 16 bits of scales and zeros."""
    at, decoded = f"d{dim}/{kind}/", {}
    for role in ("key", "value"):
        _, plain, decoded[role] = run(encode.kitty(), peer_tiles(dim, kind, role), role)
        if role == "key" and dim == 64:
            np.testing.assert_array_equal(plain["boosted"], reference()[at + "promote_mask"])
    if kind in ("gauss", "rope"):
        key, value = (np.asarray(decoded[role])[0, :64] for role in ("key", "value"))
        assert relative(key.T, reference()[at + "k_deq"]) < 1e-3
        assert relative(value, reference()[at + "v_deq"]) < 1e-3
    keys, values = decoded["key"], decoded["value"]
    assert attention_error(golden, dim, kind, keys, values, reference()[at + "attn"]) < 5e-3


def test_boosted_channels_are_the_largest_and_finer():
    x = np.random.default_rng(0).normal(size=(3, 32, 64)).astype(np.float32)
    x[1][:, [3, 40]] *= 10
    _, plain, decoded = run(encode.kitty(tile=32), x, "key")
    boosted = np.asarray(plain["boosted"], bool)
    size = np.abs(x).mean(axis=1)
    for mask, means in zip(boosted, size, strict=True):
        assert mask.sum() == 8 and means[mask].min() >= means[~mask].max()
    assert boosted[1, [3, 40]].all()
    assert np.asarray(plain["codes"]).max(axis=-1)[boosted].min() == 15
    assert np.asarray(plain["codes"]).max(axis=-1)[~boosted].max() == 3
    step = np.ptp(x, axis=1) / np.where(boosted, 15, 3)
    assert (np.abs(np.asarray(decoded) - x) <= 0.51 * step[:, None] + 1e-2).all()


def test_keeps_the_contract(stream):
    check_contract(encode.kitty(2, 2, tile=32), stream, worst=0.7)


def test_bits_and_layout():
    encoder = encode.kitty()
    assert encoder.bits_per_element("key", 64) == 2 + 0.25 + 33 / 128
    assert encoder.bits_per_element("value", 128) == 2.25
    assert encode.kitty(share=0.25).bits_per_element("key", 128) == 2 + 0.5 + 33 / 128
    tile = run(encode.kitty(tile=64), np.zeros((64, 64), np.float32), "key")[0]
    assert {name: leaf.shape for name, leaf in tile.items()} == {
        "codes": (4, 64),
        "affine": (64,),
        "boosted": (2,),
        "low": (4, 8),
    }


def test_the_newest_values_stay_exact_unless_told_otherwise():
    assert encode.kitty().keeps_values and not encode.kitty(residual=False).keeps_values
    assert not encode.rtn().keeps_values
