"""KVarN beyond its defaults: clipped ranges and 8-bit scales."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import encode
from tests.encode.contract import check_contract, peers, run

every_role = pytest.mark.parametrize("role", ["key", "value"])


@every_role
@pytest.mark.parametrize(("dim", "kind"), [(64, "gauss"), (128, "kchan")])
def test_clipped_range_matches_the_reference(golden, dim, kind, role):
    """The first tile, with the 0.5 % and 99.5 % quantiles for the ends of each row."""
    tiles = golden.tiles(dim, kind, role, 128)
    _, plain, _ = run(encode.kvarn(2, 2, rotate=False, clip=0.005), tiles, role)
    saved = {n: peers()[f"d{dim}/{kind}/quantile/{role[0]}2_{n}"] for n in ("packed", "a", "z")}
    codes = golden.codes(saved["packed"], 2).astype(np.int32)
    differ = np.abs(plain["codes"][0] - codes)
    assert differ.max() <= 1 and (differ == 0).mean() >= 0.999
    # Where another of the tying rounds was chosen, scales differ by one factor a tile.
    factor = np.median(plain["scale"][0] / saved["a"].astype(np.float32))
    for name, letter in (("scale", "a"), ("zero", "z")):
        wanted = saved[letter].astype(np.float32) * factor
        np.testing.assert_allclose(plain[name][0], wanted, rtol=3e-3)


@every_role
def test_eight_bit_scales_cost_little(golden, role):
    tiles = golden.tiles(64, "rope", role, 128)
    full = run(encode.kvarn(2, 2, rotate=False), tiles, role)[2]
    tile, plain, decoded = run(encode.kvarn(2, 2, rotate=False, scale_bits=8), tiles, role)
    error = [np.linalg.norm(y - tiles) / np.linalg.norm(tiles) for y in (full, decoded)]
    assert error[1] < 1.05 * error[0]
    assert tile["row8"].dtype == tile["column8"].dtype == jnp.float8_e4m3fn
    assert (np.asarray(plain["scale"]) > 0).all()


def test_eight_bit_scales_keep_the_contract(stream):
    check_contract(encode.kvarn(2, 2, tile=32, scale_bits=8), stream, worst=0.6)


def test_a_row_far_below_the_others_keeps_its_zero_at_least():
    """Its scale is below what float8 reaches under the unit of the tile."""
    x = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    x[7] = 3e-7 * x[7] + 1e-3
    encoder = encode.kvarn(2, 2, tile=32, rotate=False, iterations=0, scale_bits=8)
    _, plain, decoded = run(encoder, x, "value")
    assert plain["scale"][7] == 0 and (np.asarray(plain["codes"])[7] <= 3).all()
    np.testing.assert_allclose(decoded[7], x[7], rtol=4e-3)


def test_eight_bit_scales_give_the_papers_count():
    encoder = encode.kvarn(2, 2, scale_bits=8)
    for role in ("key", "value"):
        assert encoder.bits_per_element(role, 128) == 2.25 + 64 / 128**2


def test_other_options_raise():
    with pytest.raises(ValueError, match="clip=0.5 must be from 0"):
        encode.kvarn(clip=0.5)
    with pytest.raises(ValueError, match="scale_bits=4 is not supported: choose 8 or 16"):
        encode.kvarn(scale_bits=4)
