"""What the cache holds: bit for bit the same however the tokens arrived."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from tests.cache import feed as f

TRANSFORMS = {
    "exact": kvjax.cache(sink=3),
    "streaming": kvjax.cache(select=kvjax.select.streaming(3, 7)),
    "int8": kvjax.cache(encode=kvjax.encode.int8(tile=8), sink=3),
    "rtn": kvjax.cache(encode=kvjax.encode.rtn(2, 3, tile=16)),
    "kivi": kvjax.cache(encode=kvjax.encode.kivi(2, 4, tile=16, group=8), sink=3),
    "kvarn": kvjax.cache(encode=kvjax.encode.kvarn(tile=16), sink=5),
    "heed": kvjax.cache(encode=kvjax.encode.heed(tile=16), sink=5),
    "streaming+rtn": kvjax.cache(
        select=kvjax.select.streaming(4, 20), encode=kvjax.encode.rtn(2, 2, tile=16)
    ),
}


def same_bits(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), a, b)


@pytest.mark.parametrize("name", TRANSFORMS)
@settings(max_examples=12)
@given(widths=st.lists(st.sampled_from([1, 5, 31]), min_size=2, max_size=6))
def test_any_chunking_leaves_bit_equal_segments(name, widths):
    transform, spec, length = TRANSFORMS[name], f.layer_spec(), 60
    while sum(widths) > length:  # few different widths, so few programs to compile
        widths = widths[:-1]
    widths = widths + [1] * (length - sum(widths))
    q, k, v = f.draw(0, 2, length, spec)
    layer = f.empty(transform, spec, 2, 64).layers[0]
    _, pieces = f.feed(transform, layer, q, k, v, widths)
    _, whole = f.feed(transform, layer, q, k, v, [length])
    total = np.full(2, length)
    same_bits(f.masked(pieces, total, f.zeros), f.masked(whole, total, f.zeros))


@pytest.mark.parametrize("name", TRANSFORMS)
@settings(max_examples=6)
@given(lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=9, max_size=9))
def test_a_ragged_row_holds_and_reads_what_it_would_alone(name, lengths):
    transform, spec = TRANSFORMS[name], f.layer_spec()
    real = np.asarray(lengths, np.int32)
    total = real.sum(0)
    q, k, v = f.draw(1, 2, 54, spec)
    layer = f.empty(transform, spec, 2, 64).layers[0]
    out, both = f.feed(transform, layer, q, k, v, [6] * len(real), lengths=real)
    for b in range(2):
        alone = f.empty(transform, spec, 1, 64).layers[0]
        one = [x[b : b + 1] for x in (q, k, v)]
        own = real[real[:, b] > 0, b : b + 1]  # the same chunks, so lossy caches agree too
        got, alone = f.feed(transform, alone, *one, [6] * len(own), lengths=own)
        np.testing.assert_allclose(out[b, : total[b]], got[0, : total[b]], rtol=1e-5, atol=1e-5)
        row = jax.tree.map(lambda x, b=b: x[b : b + 1], f.masked(both, total, f.zeros))
        same_bits(row, f.masked(alone, total[b : b + 1], f.zeros))


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("length", [1, 40])
def test_nan_in_every_empty_slot_changes_nothing(name, length):
    transform, spec = TRANSFORMS[name], f.layer_spec()
    q, k, v = f.draw(2, 2, length + 24, spec)
    layer = f.empty(transform, spec, 2, 96).layers[0]
    before = [x[:, :length] for x in (q, k, v)]
    after = [x[:, length:] for x in (q, k, v)]
    _, clean = f.feed(transform, layer, *before, [length])
    dirty = f.masked(clean, np.full(2, length), f.poison)
    start = np.full(2, length)
    widths = [1, 22, 1]
    expected, held = f.feed(transform, clean, *after, widths, start=start)
    got, held_dirty = f.feed(transform, dirty, *after, widths, start=start)
    np.testing.assert_array_equal(got, expected)
    end = np.full(2, length + 24)
    same_bits(f.masked(held_dirty, end, f.zeros), f.masked(held, end, f.zeros))


def test_stored_positions_by_hand():
    """A ring of 3: token i stands in slot i mod 3."""
    spec = f.layer_spec()
    q, k, v = f.draw(3, 1, 5, spec)
    transform = kvjax.cache(select=kvjax.select.streaming(0, 4))
    layer = f.empty(transform, spec, 1, 10).layers[0]
    _, layer = f.feed(transform, layer, q, k, v, [2, 3])
    np.testing.assert_array_equal(layer.recent["k"][0, :, 0], k[0, 3])
    np.testing.assert_array_equal(layer.recent["k"][0, :, 1], k[0, 4])
    np.testing.assert_array_equal(layer.recent["v"][0, :, 2], v[0, 2])


def test_the_residual_stays_exact_and_sinks_are_never_encoded():
    spec, tile, sink = f.layer_spec(), 16, 5
    transform = kvjax.cache(encode=kvjax.encode.kvarn(tile=tile), sink=sink)
    q, k, v = f.draw(4, 1, sink + 2 * tile + 7, spec)
    k = k + 1000.0  # a large key bias must not leak into what is exact
    layer = f.empty(transform, spec, 1, 64).layers[0]
    _, layer = f.feed(transform, layer, q, k, v, [sink + 2 * tile + 7])
    np.testing.assert_array_equal(layer.sink["k"][0].swapaxes(0, 1), k[0, :sink])
    np.testing.assert_array_equal(layer.recent["k"][0, :, :7].swapaxes(0, 1), k[0, -7:])


def test_a_tile_is_encoded_once_and_equals_the_encoders_own_result():
    spec, tile = f.layer_spec(), 16
    encoder = kvjax.encode.kvarn(tile=tile)
    transform = kvjax.cache(encode=encoder)
    q, k, v = f.draw(5, 2, 3 * tile, spec)
    layer = f.empty(transform, spec, 2, 3 * tile).layers[0]
    _, layer = f.feed(transform, layer, q, k, v, [1] * tile + [tile + 5, tile - 5])
    tiles = encoder.encode(k, v)
    same_bits(dict(layer.body["k"]), dict(tiles.key))
    same_bits(dict(layer.body["v"]), dict(tiles.value))
