import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache.segments import Chunk
from kvjax.cache.spec import CacheSpec, LayerSpec, StreamSpec
from tests.cache import feed as f

e = kvjax.encode


def test_equal_choices_give_the_same_transform():
    assert kvjax.cache(encode=e.kvarn(), sink=4) is kvjax.cache(encode=e.kvarn(), sink=4)
    assert kvjax.cache(encode=e.kvarn(), tile=128) is kvjax.cache(encode=e.kvarn())
    assert kvjax.cache(encode=e.kvarn()) != kvjax.cache(encode=e.kvarn(3, 2))
    assert kvjax.cache(encode=e.none()) is kvjax.cache()


@pytest.mark.parametrize(
    "arguments,error,field",
    [
        ({"sink": -1}, ValueError, "cache.sink"),
        ({"encode": e.kvarn(tile=64), "tile": 128}, ValueError, "cache.tile"),
        ({"encode": "kvarn"}, TypeError, "cache.encode"),
        ({"select": e.kvarn()}, TypeError, "cache.select"),
        ({"place": 3}, TypeError, "cache.place"),
    ],
)
def test_wrong_choices_are_refused(arguments, error, field):
    with pytest.raises(error, match=field):
        kvjax.cache(**arguments)


@pytest.mark.parametrize(
    "arguments,field",
    [({"sink": -1}, "sink"), ({"recent": 0}, "recent"), ({"positions": "new"}, "positions")],
)
def test_wrong_streaming_is_refused(arguments, field):
    with pytest.raises(ValueError, match=f"select.{field}"):
        kvjax.select.streaming(**arguments)


@pytest.mark.parametrize("batch,capacity,field", [(0, 8, "batch"), (1, 0, "capacity")])
def test_wrong_sizes_are_refused(batch, capacity, field):
    with pytest.raises(ValueError, match=field):
        f.empty(kvjax.cache(), f.layer_spec(), batch, capacity)


def test_a_head_dim_the_encoder_cannot_do_is_refused_at_init():
    with pytest.raises(ValueError, match="head_dim"):
        f.empty(kvjax.cache(encode=e.kvarn()), f.layer_spec(dim=20), 1, 256)


def test_per_layer():
    small = kvjax.cache(encode=e.int8(tile=8))
    transform = kvjax.per_layer(small, {0: kvjax.cache(), -1: kvjax.cache(sink=2)})
    assert transform is kvjax.per_layer(small, {-1: kvjax.cache(sink=2), 0: kvjax.cache()})
    cache = transform.init(CacheSpec((f.layer_spec(),) * 3), 1, 64)
    assert [bool(layer.body) for layer in cache.layers] == [False, True, False]
    assert [layer.layout.sink for layer in cache.layers] == [0, 0, 2]
    assert cache.transform is transform
    assert transform.finish(cache, lambda tokens: ()) is cache


def test_per_layer_refuses_what_it_cannot_mix():
    other = kvjax.cache()._replace(attend=lambda *a: None)
    with pytest.raises(ValueError, match="layer 1"):
        kvjax.per_layer(kvjax.cache(), {1: other})
    missing = kvjax.per_layer(kvjax.cache(), {5: kvjax.cache(sink=1)})
    with pytest.raises(ValueError, match="no layer 5"):
        missing.init(CacheSpec((f.layer_spec(),) * 2), 1, 8)


def test_a_latent_cache_is_read_through_its_roles():
    """Keys are [c, k_rope], values are c: attention over the concatenation, by the definition."""
    streams = (StreamSpec("c", 1, 32, "both"), StreamSpec("k_rope", 1, 16, "key"))
    spec = LayerSpec(streams, num_heads=4, scale=0.1)
    transform, length = kvjax.cache(encode=e.int8(tile=8), sink=2), 40
    r = np.random.default_rng(0)
    q = r.normal(size=(1, length, 4, 48)).astype(np.float32)
    c, k_rope = (r.normal(size=(1, 1, length, d)).astype(np.float32) for d in (32, 16))
    layer = f.empty(transform, spec, 1, 64).layers[0]
    step = jax.jit(lambda layer, chunk: transform.append(
        layer, chunk, transform.attend(layer, chunk.query, chunk).lse))  # fmt: skip

    def chunk(a, b):
        entries = {"c": c[:, :, a:b], "k_rope": k_rope[:, :, a:b]}
        return Chunk(entries, np.int32([a]), np.int32([b - a]), q[:, a:b])

    layer = step(layer, chunk(0, 39))
    out, _ = transform.attend(layer, q[:, 39:], chunk(39, 40))
    keys = np.concatenate([c, k_rope], -1).swapaxes(1, 2)
    expected = f.plain(q[:, 39:], keys, c.swapaxes(1, 2), spec, np.ones((1, 40), bool))
    np.testing.assert_allclose(out, expected, rtol=0.02, atol=0.02)


def test_a_head_count_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="multiple"):
        f.layer_spec(heads=5, kv=3)
