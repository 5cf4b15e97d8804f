"""What attention reads: compared with a plain float64 attention over the same tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.cache.attend import rope
from tests.cache import feed as f

TOL = {"rtol": 2e-4, "atol": 2e-5}


@pytest.mark.parametrize("sink", [0, 5])
@pytest.mark.parametrize("widths", [[20], [1] * 20, [7, 1, 12], [3, 16, 1]])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_exact_equals_plain_attention(widths, softcap, sink):
    spec = f.layer_spec(softcap=softcap)
    q, k, v = f.draw(0, 2, 20, spec)
    transform = kvjax.cache(sink=sink)
    out, _ = f.feed(transform, f.empty(transform, spec, 2, 24).layers[0], q, k, v, widths)
    np.testing.assert_allclose(out, f.plain(q, k, v, spec, f.causal(20)), **TOL)


@pytest.mark.parametrize("heads,kv,dim", [(4, 4, 8), (9, 3, 8), (8, 1, 20)])
def test_head_groups(heads, kv, dim):
    spec = f.layer_spec(heads=heads, kv=kv, dim=dim)
    q, k, v = f.draw(1, 1, 9, spec)
    transform = kvjax.cache()
    out, _ = f.feed(transform, f.empty(transform, spec, 1, 9).layers[0], q, k, v, [4, 1, 4])
    np.testing.assert_allclose(out, f.plain(q, k, v, spec, f.causal(9)), **TOL)


def test_reads_more_than_one_block_of_entries():
    spec = f.layer_spec(heads=2, kv=1, dim=8)
    q, k, v = f.draw(2, 1, 1300, spec)
    transform = kvjax.cache()
    out, _ = f.feed(transform, f.empty(transform, spec, 1, 1300).layers[0], q, k, v, [700, 599, 1])
    np.testing.assert_allclose(out, f.plain(q, k, v, spec, f.causal(1300)), **TOL)


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("extra", [-1, 0, 1, 13])
def test_window_layers_at_every_length_around_the_window(window, extra):
    length = max(window + extra, 1)
    spec = f.layer_spec(window=window)
    q, k, v = f.draw(3, 2, length, spec)
    expected = f.plain(q, k, v, spec, f.causal(length, window))
    transform = kvjax.cache()
    for widths in ([1] * length, [length], [length // 2, length - length // 2]):
        layer = f.empty(transform, spec, 2, 64).layers[0]
        out, layer = f.feed(transform, layer, q, k, v, [w for w in widths if w])
        np.testing.assert_allclose(out, expected, **TOL)
        assert layer.recent["k"].shape[2] == max(window - 1, 1)  # keeps only its window


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from([1, 2, 9]), min_size=1, max_size=8),
    st.sampled_from([(0, 1), (0, 5), (5, 1), (3, 4)]),
)
def test_streaming_sees_sinks_and_recent_whatever_the_chunking(widths, kept):
    length, (sink, recent) = sum(widths), kept
    spec = f.layer_spec()
    q, k, v = f.draw(4, 2, length, spec)
    transform = kvjax.cache(select=kvjax.select.streaming(sink, recent))
    out, _ = f.feed(transform, f.empty(transform, spec, 2, 80).layers[0], q, k, v, widths)
    expected = f.plain(q, k, v, spec, f.causal(length, recent, sink))
    np.testing.assert_allclose(out, expected, **TOL)


def turn(x, position, inverse):
    angle = position.astype(np.float32)[..., None] * inverse
    return np.asarray(rope(x, np.cos(angle), np.sin(angle)))


def test_rerotated_streaming_counts_positions_inside_the_cache():
    spec, length, sink, recent = f.layer_spec(), 20, 3, 6
    q, k, v = f.draw(5, 1, length, spec)
    inverse = (10.0 ** -np.arange(f.DIM // 2)).astype(np.float32)
    at = np.arange(length)[None]
    transform = kvjax.cache(select=kvjax.select.streaming(sink, recent, positions="rerotated"))
    layer = f.empty(transform, spec, 1, 32).layers[0]
    out, _ = f.feed(transform, layer, turn(q, at, inverse), turn(k, at, inverse), v,
                    [5, 1, 1, 9, 4], inverse=inverse)  # fmt: skip
    for t in range(length):
        seen = [j for j in range(t + 1) if j < sink or j > t - recent]
        place = np.arange(len(seen))[None]  # consecutive, as StreamingLLM's cache holds them
        query = turn(q[:, t : t + 1], place[:, -1:], inverse)
        keys = turn(k[:, seen], place, inverse)
        expected = f.plain(query, keys, v[:, seen], spec, np.ones((1, len(seen)), bool))
        np.testing.assert_allclose(out[:, t : t + 1], expected, **TOL)


@pytest.mark.parametrize(
    "encoder",
    [
        kvjax.encode.int8(tile=8),
        kvjax.encode.rtn(key_bits=3, value_bits=2, tile=32),
        kvjax.encode.kvarn(key_bits=2, value_bits=4, tile=32),
    ],
    ids=lambda e: type(e).__name__,
)
def test_encoded_tiles_are_read_as_their_encoder_decodes_them(encoder):
    spec, tile, sink = f.layer_spec(), encoder.tile, 5
    length = sink + 3 * tile + 4
    q, k, v = f.draw(6, 2, length, spec)
    transform = kvjax.cache(encode=encoder, sink=sink)
    widths = [sink + 3 * tile - 1] + [1] * 5  # ends 4 tokens after the third tile
    out, _ = f.feed(transform, f.empty(transform, spec, 2, length).layers[0], q, k, v, widths)
    k2, v2 = (
        np.asarray(x)
        for x in encoder.decode(
            encoder.encode(k[:, sink : sink + 3 * tile], v[:, sink : sink + 3 * tile])
        )
    )
    stored_k, stored_v = k.copy(), v.copy()
    stored_k[:, sink : sink + 3 * tile], stored_v[:, sink : sink + 3 * tile] = k2, v2
    last = length - 1  # a query after everything was stored
    expected = f.plain(q[:, last:], stored_k, stored_v, spec, np.ones((1, length), bool))
    np.testing.assert_allclose(out[:, last:], expected, rtol=1e-3, atol=1e-4)
    error = np.abs(out[:, last:] - f.plain(q, k, v, spec, f.causal(length))[:, last:]).max()
    assert error > 1e-4  # the cache really is lossy


def test_encoded_window_reuses_tile_slots():
    spec, tile, window = f.layer_spec(window=20), 8, 20
    encoder = kvjax.encode.int8(tile=tile)
    q, k, v = f.draw(7, 2, 90, spec)
    transform = kvjax.cache(encode=encoder)
    for widths in ([1] * 90, [33, 1, 40, 16]):
        layer = f.empty(transform, spec, 2, 96).layers[0]
        assert layer.layout.tiles == 3  # ceil((window - 1) / tile), not 96 / 8
        out, _ = f.feed(transform, layer, q, k, v, widths)
        np.testing.assert_allclose(
            out, f.plain(q, k, v, spec, f.causal(90, window)), rtol=0.03, atol=0.03
        )


def test_lse_is_the_log_of_the_softmax_sum():
    spec = f.layer_spec()
    q, k, v = f.draw(8, 1, 6, spec)
    transform = kvjax.cache()
    layer = f.empty(transform, spec, 1, 8).layers[0]
    _, layer = f.feed(transform, layer, q, k, v, [4])
    from kvjax.cache.segments import Chunk

    entries = {"k": k[:, 4:5].swapaxes(1, 2), "v": v[:, 4:5].swapaxes(1, 2)}
    chunk = Chunk(entries, np.int32([4]), np.int32([1]), q[:, 4:5])
    _, lse = transform.attend(layer, q[:, 4:5], chunk)
    keys = np.repeat(k[0, :5], spec.num_heads // spec.kv_heads, 1)
    scores = np.einsum("hd,shd->hs", q[0, 4], keys) * spec.scale
    np.testing.assert_allclose(lse[0, 0], np.log(np.exp(scores).sum(-1)), rtol=1e-5)
