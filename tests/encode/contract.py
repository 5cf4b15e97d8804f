"""What the tests of single encoders share: the contract in few compilations, the peers' data."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from safetensors.numpy import load_file

FOLDER = Path(__file__).parents[1] / "golden" / "quant"
ROLES = ("key", "value")


@cache
def peers():
    """tests/golden/quant/peers.safetensors; see the README there."""
    return load_file(FOLDER / "peers.safetensors")


def peer_tiles(dim, kind, role, tile=128):
    """Input of head 0, unrotated: float16 [T / tile, tile, dim]."""
    return peers()[f"d{dim}/{kind}/{role[0]}"].reshape(-1, tile, dim)


@partial(jax.jit, static_argnums=(0, 2))
def run(encoder, x, role):
    """Tiles [..., C, D] encoded, unpacked, and decoded in the original frame."""
    tile = encoder.encode_tile(x, role)
    dim = x.shape[-1]
    decoded = encoder.unrotate(encoder.decode_tile(tile, role, dim), role)
    return tile, encoder.unpack_tile(tile, role, dim), decoded


def attention(query, key, value):
    """softmax(q K^T / sqrt(D)) V in float64 of q [H, D] over one head [..., C, D]; [H, D]."""
    dim = query.shape[-1]
    key, value = (np.asarray(x, np.float64).reshape(-1, dim) for x in (key, value))
    scores = np.asarray(query, np.float64) @ key.T / np.sqrt(dim)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def relative(got, wanted):
    """Relative error in the Frobenius norm."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def attention_error(golden, dim, kind, key, value, wanted):
    """Relative error of attention over decoded head 0, with the query of the reference."""
    query = golden.rotated[f"d{dim}/{kind}/q"][0, :4]
    return relative(attention(query, key, value), wanted)


def check_contract(encoder, stream, worst, zeros=True):
    """All that holds for every encoder with tile=32, at [2, 128, 2, 64].

    ``worst``: largest relative error of keys and values. ``zeros``: whether a zero value token
    among others decodes to exact zeros.
    """
    stream = [np.asarray(x) for x in stream]
    whole = encoder.encode(*stream)
    for role, x, tiles in zip(ROLES, stream, (whole.key, whole.value), strict=True):
        x_tile = x[:, 32:64].swapaxes(1, 2)
        tile, _, decoded = run(encoder, x_tile, role)
        for name, leaf in tile.items():
            np.testing.assert_array_equal(leaf, tiles[name][:, :, 1], err_msg=f"{role} {name}")
        measured = sum(leaf.nbytes for leaf in tiles.values())
        assert measured == 2 * 2 * 4 * encoder.tile_bytes(role, 64)
        assert measured * 8 == encoder.bits_per_element(role, 64) * x.size
        assert decoded.shape == x_tile.shape and decoded.dtype == jnp.float32
        assert worst / 5 < relative(decoded, x_tile) < worst, role
        check_turns(encoder, x_tile, role)
        check_extremes(encoder, x_tile, role)
    check_flush(encoder, stream[0].swapaxes(1, 2))
    value = stream[1][:, :32].swapaxes(1, 2).copy()
    value[:, :, 7] = 0.0
    assert not (zeros and np.asarray(run(encoder, value, "value")[2])[:, :, 7].any())
    assert len({encoder, type(encoder)(**vars(encoder))}) == 1


@partial(jax.jit, static_argnums=(0, 2))
def turn(encoder, x, role):
    turned = encoder.rotate(x, role)
    return turned, encoder.unrotate(turned, role)


def check_turns(encoder, x, role):
    """Turning there and back changes nothing, and keeps lengths."""
    turned, back = turn(encoder, x, role)
    np.testing.assert_allclose(back, x, rtol=1e-3, atol=1e-3)
    lengths = [np.linalg.norm(np.asarray(y), axis=-1) for y in (turned, x)]
    np.testing.assert_allclose(*lengths, rtol=1e-4)


def check_extremes(encoder, x, role):
    """Nothing becomes infinite or NaN; what 16 bits can hold does not grow."""
    assert not np.asarray(run(encoder, np.zeros_like(x), role)[2]).any()
    for size in (1e-12, 1e5, 1e30):
        assert np.isfinite(run(encoder, x * np.float32(size), role)[2]).all(), size
    for small in (x * np.float32(1e-12), np.full_like(x, -1.5)):
        assert np.abs(run(encoder, small, role)[2]).max() <= 3 * np.abs(small).max()


def check_flush(encoder, buffer):
    """As a cache flushes: out of a buffer, inside a branch, the same bits."""

    @jax.jit
    def flush(buffer, full):
        def store():
            return encoder.encode_tile(buffer[:, :, 8:40] * 2.0, "key")

        shapes = jax.eval_shape(store)
        return lax.cond(full, store, lambda: jax.tree.map(jnp.zeros_like, shapes))

    wanted = run(encoder, buffer[:, :, 8:40] * np.float32(2), "key")[0]
    for name, leaf in flush(buffer, True).items():
        np.testing.assert_array_equal(leaf, wanted[name], err_msg=name)
