"""Every encoder behind a cache: what attention reads is what the encoder decodes."""

import numpy as np
import pytest

import kvjax
from kvjax import encode
from tests.cache import feed

ENCODERS = {
    "fp8": encode.fp8(tile=32),
    "int4": encode.int4(tile=32),
    "hadamard_rtn": encode.hadamard_rtn(3, 2, tile=32),
    "hadamard_rtn, keys per token": encode.hadamard_rtn(3, 2, tile=32, key_axis="token"),
    "kivi": encode.kivi(2, 4, tile=32, group=16, residual=False),
    "kitty": encode.kitty(2, 2, tile=32, residual=False),
    "turboquant": encode.turboquant(2, 3, tile=32),
    "turboquant product": encode.turboquant(3, 2, tile=32, product=True),
    "turboquant outliers": encode.turboquant(2, 2, tile=32, outliers=4),
    "turboquant_nc": encode.turboquant_nc(3, 4, tile=32),
    "oscar": encode.oscar(2, 2, tile=32, group=16),
    "kvarn, 8-bit scales": encode.kvarn(2, 2, tile=32, scale_bits=8, clip=0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)
def test_attention_reads_what_the_encoder_decodes(encoder):
    spec, sink = feed.layer_spec(), 5
    body = slice(sink, sink + 2 * encoder.tile)
    q, k, v = feed.draw(6, 2, body.stop + 1, spec)
    transform = kvjax.cache(encode=encoder, sink=sink)
    layer = feed.empty(transform, spec, 2, body.stop + 1).layers[0]
    out, layer = feed.feed(transform, layer, q, k, v, [body.stop, 1])
    for role, stream in (("key", "k"), ("value", "v")):
        stored = sum(leaf.nbytes for leaf in layer.body[stream].values())
        tiles = 2 * feed.KV * layer.layout.tiles
        assert stored == tiles * encoder.tile_bytes(role, feed.DIM)
    decoded = encoder.decode(encoder.encode(k[:, body], v[:, body]))
    stored_k, stored_v = k.copy(), v.copy()
    stored_k[:, body], stored_v[:, body] = (np.asarray(x) for x in decoded)
    everything = np.ones((1, body.stop + 1), bool)
    expected = feed.plain(q[:, -1:], stored_k, stored_v, spec, everything)
    np.testing.assert_allclose(out[:, -1:], expected, rtol=1e-3, atol=2e-4)
    exact = feed.plain(q[:, -1:], k, v, spec, everything)
    assert np.abs(out[:, -1:] - exact).max() > 1e-3  # the cache really is lossy
