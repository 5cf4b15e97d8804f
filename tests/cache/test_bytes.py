import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.cache.spec import CacheSpec, LayerSpec, StreamSpec
from tests.cache import feed as f

e = kvjax.encode
TRANSFORMS = {
    "exact": kvjax.cache(),
    "streaming": kvjax.cache(select=kvjax.select.streaming(4, 100)),
    "int8": kvjax.cache(encode=e.int8(), sink=128),
    "rtn 2/3": kvjax.cache(encode=e.rtn(2, 3), sink=4),
    "kvarn": kvjax.cache(encode=e.kvarn(), sink=128),
    "kvarn k4v2, tile 64": kvjax.cache(encode=e.kvarn(4, 2, tile=64)),
    "kivi, its values late": kvjax.cache(encode=e.kivi(), sink=4),
    "kitty": kvjax.cache(encode=e.kitty()),
    "heed, with its queries": kvjax.cache(encode=e.heed(), sink=4),
    "streaming+kvarn": kvjax.cache(select=kvjax.select.streaming(4, 300), encode=e.kvarn()),
    "per layer": kvjax.per_layer(kvjax.cache(encode=e.kvarn()), {0: kvjax.cache()}),
}


@pytest.mark.parametrize("capacity", [1, 127, 128, 1000, 4096])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_live_bytes_equal_the_formula(name, capacity):
    layers = (f.layer_spec(dim=64), f.layer_spec(dim=64, window=200, dtype="bfloat16"))
    spec, transform = CacheSpec(layers), TRANSFORMS[name]
    cache = transform.init(spec, 2, capacity)
    live = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert kvjax.nbytes(cache) == kvjax.footprint(spec, transform, 2, capacity)
    assert kvjax.nbytes(cache).total == live
    assert kvjax.nbytes(cache).host == 0


def test_exact_bytes_by_hand():
    cache = f.empty(kvjax.cache(), f.layer_spec(), 2, 10)
    assert kvjax.nbytes(cache).device == 2 * 2 * 3 * 10 * 16 * 4 + 2 * 4  # k and v; lengths


@pytest.mark.parametrize(
    ("encoder", "dim", "bits"),
    [
        (e.kvarn(), 128, 2.375),
        (e.kvarn(), 64, 2.5625),
        (e.int8(), 128, 8.25),
        (e.rtn(4, 4), 128, 4.25),
    ],
)
def test_bits_of_the_body(encoder, dim, bits):
    """Measured on the arrays: K and V together, all metadata included."""
    cache = f.empty(kvjax.cache(encode=encoder), f.layer_spec(dim=dim), 1, 1024)
    body = sum(x.nbytes for x in jax.tree.leaves(cache.layers[0].body))
    assert 8 * body / (2 * 3 * 1024 * dim) == bits


def test_buffers_have_the_dtypes_that_were_asked_for():
    cache = f.empty(kvjax.cache(encode=e.int8(), sink=8), f.layer_spec(dtype="bfloat16"), 1, 512)
    layer = cache.layers[0]
    assert layer.recent["k"].dtype == layer.sink["v"].dtype == jnp.bfloat16
    assert {x.dtype.name for x in layer.body["k"].values()} == {"int8", "float32"}


def test_window_layers_weigh_the_same_at_any_capacity():
    sizes = [
        kvjax.nbytes(f.empty(t, f.layer_spec(window=100), 1, n)).total
        for t in (kvjax.cache(), kvjax.cache(encode=e.rtn(2, 2, tile=16)))
        for n in (256, 4096)
    ]
    assert sizes[0] == sizes[1] and sizes[2] == sizes[3] < sizes[0]


def test_a_latent_cache_needs_no_code_of_its_own():
    """Streams with other roles: one latent that is key and value, and a rotary key."""
    streams = (StreamSpec("c", 1, 32, "both"), StreamSpec("k_rope", 1, 16, "key"))
    spec = LayerSpec(streams, num_heads=4, scale=0.1)
    transform = kvjax.cache(encode=e.kvarn(tile=32), sink=4)
    cache = f.empty(transform, spec, 1, 100)
    assert kvjax.nbytes(cache) == kvjax.footprint(CacheSpec((spec,)), transform, 1, 100)
