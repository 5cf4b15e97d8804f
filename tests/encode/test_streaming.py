"""Caches that are filled as a model fills them, against reference data and the papers' rules."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import kvjax
from kvjax import encode
from tests.cache import feed as f
from tests.encode.contract import FOLDER, relative

# KIVI, residual 128, a prefill of 200 tokens and 300 single ones (tests/golden/quant/README.md).
PREFILL, LENGTH = 200, 500
QUERIES = (200, 256, 257, 328, 384, 500)
FOUR = pytest.param(4, marks=pytest.mark.slow)


@cache
def reference():
    return load_file(FOLDER / "kivi_stream.safetensors")


@cache
def kivi_run(bits, residual=True):
    """Outputs [H, D] at QUERIES, the layer after them, and the number of tiles held by key and by
    value after every token from PREFILL on."""
    spec = f.layer_spec(heads=8, kv=2, dim=64)
    k, v = (reference()[n].swapaxes(1, 2).astype(np.float32) for n in "kv")
    q = np.zeros((1, LENGTH, 8, 64), np.float32)
    for n in QUERIES:
        q[:, n - 1] = reference()[f"q_t{n}"]
    transform = kvjax.cache(encode=encode.kivi(bits, bits, residual=residual))
    layer = f.empty(transform, spec, 1, 512).layers[0]
    outs, layers, held = {}, {}, []
    for width in [PREFILL] + [1] * (LENGTH - PREFILL):
        at = 0 if width == PREFILL else PREFILL + len(held) - 1
        part = [x[:, at : at + width] for x in (q, k, v)]
        out, layer = f.feed(transform, layer, *part, [width], start=[at])
        if (n := at + width) in QUERIES:
            outs[n], layers[n] = out[0, -1], layer
        codes = [np.asarray(layer.body[s]["codes"]) for s in "kv"]
        held.append([int(c.any(axis=(0, 1, 3, 4)).sum()) for c in codes])
    return transform, outs, layers, np.asarray(held)


@pytest.mark.parametrize("bits", [2, FOUR])
def test_kivi_attention_equals_the_reference_at_every_query(bits):
    """To the 16 bits of scales; had values left with their tile, it would be off by far more."""
    outs = kivi_run(bits)[1]
    for n in QUERIES:
        assert relative(outs[n], reference()[f"b{bits}/t{n}/attn_out"][0]) < 2e-3, n


@pytest.mark.slow
def test_kivi_without_its_residual_rule_is_another_method():
    wanted = reference()["b2/t500/attn_out"][0]
    assert relative(kivi_run(2, residual=False)[1][500], wanted) > 0.05


@pytest.mark.parametrize("bits", [2, FOUR])
def test_kivi_quantizes_the_reference_tokens(bits):
    """Keys by the residual of 128, and of the values all but the newest 128."""
    transform, _, layers, held = kivi_run(bits)
    lens = reference()["lens_all"]
    np.testing.assert_array_equal(lens[:, 0], np.arange(PREFILL + 1, LENGTH + 1))
    np.testing.assert_array_equal(held[1:, 0] * 128, lens[:, 1])  # keys
    assert (held[1:, 1] * 128 >= lens[:, 3]).all()  # values, some of them encoded early
    for n in QUERIES:
        # A query's own step is still to quantize the token that it pushes out.
        exact = read_exact(transform, layers[n], n)
        wanted = int(lens[lens[:, 0] == n, 4][0]) if n > PREFILL else 128
        assert len(exact) == wanted and exact == set(range(n - wanted, n)), n


def read_exact(transform, layer, length):
    """The tokens, of `length` held, whose values attention reads from the exact slots.

    Attention is linear in the values: a one in channel c of one slot's value, and the output's
    channel c grows by that token's weight.
    """
    size, dim = layer.recent["v"].shape[2:]
    q = np.zeros((1, 1, 8, dim), np.float32)
    token = np.zeros((1, 1, 2, dim), np.float32)

    def output(exact):
        wide = jnp.broadcast_to(jnp.asarray(exact, jnp.float32), layer.recent["v"].shape)
        changed = dataclasses.replace(layer, recent={**layer.recent, "v": wide})
        return f.feed(transform, changed, q, token, token, [1], start=[length])[0][0, 0, 0]

    nothing = output(np.zeros((size, dim)))
    found = set()
    for at in range(0, size, dim):
        weight = output(np.eye(size)[:, at : at + dim]) - nothing
        found |= {at + int(c) for c in np.flatnonzero(weight > 1e-5)}
    newest = length - 1 - (length - 1 - np.arange(size)) % size  # the token last put in a slot
    return {int(newest[slot]) for slot in found}


@pytest.mark.parametrize(
    ("bits", "n"), [(2, 257), (2, 500), pytest.param(4, 500, marks=pytest.mark.slow)]
)
def test_kivi_holds_the_reference_codes(golden, bits, n):
    layer = kivi_run(bits)[2][n]
    at = f"b{bits}/t{n}/"
    saved_lens = reference()[at + "lens"]
    for role, stream in (("key", "k"), ("value", "v")):
        codes = golden.codes(
            np.ascontiguousarray(reference()[f"{at}{stream}_code"][0]).view(np.uint8), bits
        )
        wanted = [reference()[f"{at}{stream}_{name}"][0] for name in ("scale", "mn")]
        plain = layer.plan.encode.unpack_tile(dict(layer.body[stream]), role, 64)
        tokens = codes.shape[2 if role == "key" else 1]
        assert tokens == saved_lens[0 if role == "key" else 2]
        got = {name: in_order(x[0], role) for name, x in plain.items()}
        cut = np.s_[:, :, :tokens] if role == "key" else np.s_[:, :tokens]
        np.testing.assert_array_equal(got["codes"][cut], codes)
        groups = np.s_[:, :, : tokens // 32] if role == "key" else np.s_[:, :tokens]
        np.testing.assert_allclose(got["scale"][groups], wanted[0], rtol=1e-3)
        np.testing.assert_allclose(got["zero"][groups], wanted[1], rtol=1e-3, atol=1e-3)


def in_order(tiles, role):
    """Rows [K, N, R, M] of all tiles: those of keys [K, R, N * M], of values [K, N * R, M]."""
    tiles = np.asarray(tiles)
    tiles = tiles.swapaxes(1, 2) if role == "key" else tiles
    heads, first = tiles.shape[:2]
    shape = (heads, first, -1) if role == "key" else (heads, -1, tiles.shape[-1])
    return tiles.reshape(shape)


# KVarN's three regions, with small numbers.
SINK, TILE, TAIL = 5, 32, 7
FIRST = SINK + 2 * TILE + TAIL


def kvarn_start(seed=0):
    spec = f.layer_spec()
    q, k, v = f.draw(seed, 1, 200, spec)
    transform = kvjax.cache(encode=encode.kvarn(2, 2, tile=TILE), sink=SINK)
    layer = f.empty(transform, spec, 1, 200).layers[0]
    out, layer = f.feed(transform, layer, *(x[:, :FIRST] for x in (q, k, v)), [FIRST])
    return spec, transform, layer, out, (q, k, v)


def follow(transform, layer, streams, at, widths, lengths=None):
    """The outputs of the next chunks of real tokens, which begin at token `at`, and the layer."""
    rest = [x[:, at:] for x in streams]
    return f.feed(transform, layer, *rest, widths, start=[at], lengths=lengths)


def written(layer):
    """Which tile slots hold anything, [N] bool."""
    return np.asarray(layer.body["k"]["codes"]).any(axis=(0, 1, 3, 4))


def changed(before, after):
    """The tile slots in which anything differs between two bodies."""
    slots = set()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        differ = np.moveaxis(np.asarray(old) != np.asarray(new), 2, 0)
        slots |= {int(i) for i in np.flatnonzero(differ.reshape(len(differ), -1).any(axis=1))}
    return slots


def test_kvarn_holds_sinks_whole_groups_and_an_exact_tail():
    _, _, layer, _, (_, k, v) = kvarn_start()
    body = slice(SINK, SINK + 2 * TILE)
    tiles = layer.plan.encode.encode(k[:, body], v[:, body])
    for name, x, wanted in (("k", k, tiles.key), ("v", v, tiles.value)):
        x = x.swapaxes(1, 2)
        np.testing.assert_array_equal(layer.sink[name], x[:, :, :SINK])
        np.testing.assert_array_equal(layer.recent[name][:, :, :TAIL], x[:, :, body.stop : FIRST])
        for leaf, array in wanted.items():
            np.testing.assert_array_equal(layer.body[name][leaf][:, :, :2], array)
    np.testing.assert_array_equal(written(layer)[:3], [True, True, False])


def test_kvarn_reads_its_first_chunk_exact_and_later_ones_as_stored():
    spec, transform, layer, out, (q, k, v) = kvarn_start()
    exact = f.plain(q[:, :FIRST], k[:, :FIRST], v[:, :FIRST], spec, f.causal(FIRST))
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)

    total, body = FIRST + 6, slice(SINK, SINK + 2 * TILE)
    got, _ = follow(transform, layer, (q, k, v), FIRST, [6])
    stored = k.copy(), v.copy()
    for x, decoded in zip(
        stored, layer.plan.encode.decode(layer.plan.encode.encode(k[:, body], v[:, body])),
        strict=True,
    ):  # fmt: skip
        x[:, body] = decoded
    visible = f.causal(total)[FIRST:]
    queries = q[:, FIRST:total]
    wanted = f.plain(queries, *(x[:, :total] for x in stored), spec, visible)
    np.testing.assert_allclose(got[:, :6], wanted, rtol=1e-3, atol=2e-4)
    wrong = f.plain(queries, k[:, :total], v[:, :total], spec, visible)
    assert np.abs(wrong - wanted).max() > 0.05


def test_kvarn_encodes_a_group_once_when_it_is_complete():
    _, transform, layer, _, streams = kvarn_start()
    times: dict[int, list[int]] = {}
    for n in range(FIRST, FIRST + 2 * TILE):
        _, after = follow(transform, layer, streams, n, [1])
        for slot in changed(layer.body, after.body):
            times.setdefault(slot, []).append(n + 1)
        layer = after
    assert times == {2: [SINK + 3 * TILE], 3: [SINK + 4 * TILE]}


def test_kvarn_encodes_committed_tokens_only():
    """A draft of six of which few are accepted: a group is complete when its own tokens are."""
    _, transform, layer, _, streams = kvarn_start()
    missing = TILE - TAIL  # tokens until the third group is complete
    at, lengths = FIRST, [6, 6, 6, 6, 0]
    _, layer = follow(transform, layer, streams, at, [6] * 5, [[n] for n in lengths])
    assert sum(lengths) == missing - 1
    assert not written(layer)[2]  # the rejected tokens would have filled it
    at += sum(lengths)
    _, layer = follow(transform, layer, streams, at, [6], [[1]])
    assert written(layer)[2] and not written(layer)[3]
    body = slice(SINK + 2 * TILE, SINK + 3 * TILE)
    tiles = layer.plan.encode.encode(*(x[:, body] for x in streams[1:]))
    for leaf, array in tiles.value.items():
        np.testing.assert_array_equal(layer.body["v"][leaf][:, :, 2:3], array)
