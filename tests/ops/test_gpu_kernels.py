"""The GPU kernels under GPU interpret mode, against the definition; and the register moves that
interpret mode cannot run, against the layouts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.ops import packing
from kvjax.ops.affine import Affine
from kvjax.ops.dense_decode_attention import gpu as dense
from kvjax.ops.encode_tile import gpu as encode
from kvjax.ops.gpu_blocks import Gpu, dense_blocks, packed_blocks
from kvjax.ops.mosaic_gpu import BY_ROW, PAIRS, WG, WORDS
from kvjax.ops.partials import Block, Scoring, Visible, read
from kvjax.ops.quantized_decode_attention import gpu as packed

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def definition(query, key, value, length, bias, scoring):
    """key, value: float32 [B,K,S,D]."""
    place = jnp.broadcast_to(jnp.arange(key.shape[2]), (len(length), key.shape[2]))
    block = Block(key, value, place, place < length[:, None], bias)
    last = jnp.full(query.shape[:2], key.shape[2])
    every = Visible(causal=True)
    return read(query.astype(jnp.float32), last, lambda i: block, 1, scoring, every)


def entries(rng, shape, dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)


def some_bias(rng, shape):
    bias = rng.normal(size=shape)
    bias[rng.uniform(size=shape) < 0.3] = -np.inf
    return jnp.asarray(bias, jnp.float32)


def close(got, want, tolerance):
    """Errors of `out` as a share of its largest entry; of `lse` absolute."""
    seen = np.isfinite(want.lse)
    np.testing.assert_array_equal(np.isfinite(got.lse), seen)
    np.testing.assert_allclose(got.lse[seen], want.lse[seen], atol=tolerance)
    largest = np.abs(want.out).max()
    np.testing.assert_allclose(got.out, want.out, atol=tolerance * largest)


def tile(rng, lead, rows, minor, bits, column, meta):
    codes = jnp.asarray(rng.integers(0, 2**bits, (*lead, rows, minor)), jnp.int32)
    scale = rng.uniform(0.2, 1, (*lead, rows)) * 3 / 2**bits
    zero = rng.normal(size=(*lead, rows)) - 1.5
    made = {
        "codes": packing.pack(codes, bits),
        "affine": packing.pack_pair(jnp.float32(scale), jnp.float32(zero), meta),
    }
    if column:
        factor = jnp.float32(rng.uniform(0.5, 1.5, (*lead, minor)))
        made["column"] = packing.pack_halves(factor, meta)
    return made


def poison(key, value, length, size):
    """All bits set, so NaN as 16-bit floats, wherever nothing valid lies."""
    lead = value["affine"].shape
    token = np.arange(size).reshape(lead[2:]) < np.asarray(length)[:, None, None, None]
    some = token.any(axis=-1, keepdims=True)
    key = {name: jnp.where(some, x, -1) if x.ndim == 4 else x for name, x in key.items()}
    spoiled = {"affine": token, "column": some}
    value = {n: jnp.where(spoiled[n], x, -1) if n in spoiled else x for n, x in value.items()}
    return key, value, token.reshape(len(length), 1, size)


PACKED = {
    "column": dict(dim=64, column=True, length=(100,), tiles=1, meta="bfloat16"),
    "ragged": dict(batch=2, tokens=3, heads=8, kv=2, bits=(4, 8), bias=3, length=(300, 0),
                   splits=2, softcap=5.0),
    "wide": dict(tokens=8, heads=8, bits=(8, 4), bias=1, length=(131,), tiles=2, splits=2),
    "plain": dict(heads=4, kv=2, length=(384,), splits=3),
    "odd group": dict(heads=9, kv=3, dim=64, length=(100,), tiles=1),
    "column bias": dict(tokens=2, column=True, bits=(1, 2), bias=2, length=(256,), tiles=2),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [n if n == "column" else pytest.param(n, marks=pytest.mark.slow) for n in PACKED],
)
def test_packed_tiles_under_the_interpreter(name):
    case = dict(batch=1, tokens=1, heads=2, kv=1, dim=128, tiles=3, bits=(2, 2), column=False,
                meta="float16", bias=0, splits=1, softcap=None) | PACKED[name]  # fmt: skip
    rng = np.random.default_rng(0)
    dim, tiles, meta = case["dim"], case["tiles"], case["meta"]
    format = Affine(128, *case["bits"], case["column"], meta)
    scoring = Scoring(dim**-0.5, case["softcap"])
    query = entries(rng, (case["batch"], case["tokens"], case["heads"], dim), jnp.bfloat16)
    lead = (case["batch"], case["kv"], tiles)
    key = tile(rng, lead, dim, 128, case["bits"][0], case["column"], meta)
    value = tile(rng, lead, 128, dim, case["bits"][1], case["column"], meta)
    length = jnp.array(case["length"], jnp.int32)
    size = tiles * 128
    bias = some_bias(rng, (case["batch"], case["bias"], size)) if case["bias"] else None
    whole = [
        format.decode(x, role, dim).reshape(*lead[:2], size, dim)
        for x, role in ((key, "key"), (value, "value"))
    ]
    want = definition(query, *whole, length, bias, scoring)
    key, value, valid = poison(key, value, length, size)
    if bias is not None:
        bias = jnp.where(valid, bias, jnp.nan)
    assert packed.refusal(query, value, format) == ""
    got = packed.attention(
        query, key, value, length, bias, format=format, scoring=scoring,
        blocks=Gpu(case["splits"], 2), interpret=INTERPRET,
    )  # fmt: skip
    close(got, want, 1e-3)


DENSE = {
    "short": dict(tokens=2, heads=6, kv=3, size=20, length=(7,), dtype="float16"),
    "plain": dict(size=384, length=(384,), splits=3),
    "ragged": dict(batch=2, heads=9, kv=3, dim=64, size=304, length=(300, 131), splits=2),
    "bias": dict(tokens=3, heads=8, kv=2, dim=256, size=208, bias=3, length=(190,), splits=3,
                 softcap=5.0),
    "empty": dict(batch=2, dim=64, size=208, bias=1, length=(0, 208), splits=2),
    "wide": dict(tokens=8, heads=8, size=128, length=(77,)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n == "short" else pytest.param(n, marks=pytest.mark.slow) for n in DENSE]
)
def test_exact_entries_under_the_interpreter(name):
    case = dict(batch=1, tokens=1, heads=2, kv=1, dim=128, bias=0, splits=1, softcap=None,
                dtype="bfloat16") | DENSE[name]  # fmt: skip
    rng = np.random.default_rng(1)
    shape = (case["batch"], case["kv"], case["size"], case["dim"])
    scoring = Scoring(case["dim"] ** -0.5, case["softcap"])
    query = entries(rng, (case["batch"], case["tokens"], case["heads"], case["dim"]), case["dtype"])
    key, value = (entries(rng, shape, case["dtype"]) for _ in range(2))
    length = jnp.array(case["length"], jnp.int32)
    bias = some_bias(rng, (case["batch"], case["bias"], case["size"])) if case["bias"] else None
    whole = key.astype(jnp.float32), value.astype(jnp.float32)
    want = definition(query, *whole, length, bias, scoring)
    valid = jnp.arange(case["size"]) < length[:, None]
    key, value = (jnp.where(valid[:, None, :, None], x, jnp.nan) for x in (key, value))
    if bias is not None:
        bias = jnp.where(valid[:, None], bias, jnp.nan)
    assert dense.refusal(query, key, value) == ""
    got = dense.attention(
        query, key, value, length, bias, scoring=scoring, blocks=Gpu(case["splits"], 2),
        interpret=INTERPRET,
    )  # fmt: skip
    close(got, want, 5e-3 if case["dtype"] == "bfloat16" else 1e-3)


def places(layout, shape):
    """[4 warps, 32 lanes, *registers, vector] of the flat places of an array of `shape`."""
    layout = layout.to_mgpu()
    x = np.arange(np.prod(shape)).reshape(shape)
    for part in layout.tiling.tiles:
        lead, tail = x.shape[: x.ndim - len(part)], x.shape[x.ndim - len(part) :]
        split = [n for size, step in zip(tail, part, strict=True) for n in (size // step, step)]
        x = x.reshape(*lead, *split)
        start, rank = len(lead), len(part)
        order = [start + 2 * i for i in range(rank)] + [start + 2 * i + 1 for i in range(rank)]
        x = x.transpose(*range(start), *order)
    chosen = [d for d in (*layout.warp_dims, *layout.lane_dims) if isinstance(d, int)]
    chosen.append(layout.vector_dim)
    sizes = [x.shape[d] for d in chosen]
    registers = [d for d in range(-x.ndim, 0) if d not in chosen]
    x = x.transpose(*[d + x.ndim for d in (*chosen[:-1], *registers, chosen[-1])])
    threads = []
    for dims in (layout.warp_dims, layout.lane_dims):
        threads.append([sizes.pop(0) if isinstance(d, int) else -d.times for d in dims])
    flat = [n for n in itertools.chain(*threads) if n > 0]
    x = x.reshape(*[n if n > 0 else 1 for n in itertools.chain(*threads)], *x.shape[len(flat) :])
    full = [abs(n) for n in itertools.chain(*threads)]
    x = np.broadcast_to(x, (*full, *x.shape[len(full) :]))
    return x.reshape(4, 32, *layout.registers_shape(shape), x.shape[-1])


def test_a_product_reads_registers_as_the_instruction_set_says():
    # PTX ISA, "Register fragments for wgmma.mma_async.m64k16": matrix A.
    row, column = np.divmod(places(WG, (64, 16)).reshape(4, 32, 4, 2), 16)
    lane = np.arange(32)
    for register, (down, right) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
        for warp in range(4):
            np.testing.assert_array_equal(
                row[warp, :, register], (16 * warp + lane // 4 + down)[:, None].repeat(2, 1)
            )
            np.testing.assert_array_equal(
                column[warp, :, register], (lane % 4 * 2 + right)[:, None] + [0, 1]
            )


@pytest.mark.parametrize(("rows", "words"), [(64, 4), (64, 8), (128, 8), (128, 32)])
def test_a_word_lies_where_its_two_halves_belong(rows, words):
    word = places(WORDS, (rows, words, 1)).reshape(4, 32, -1)
    pair = places(WG, (rows, 2 * words)).reshape(4, 32, -1, 2)
    np.testing.assert_array_equal(pair, np.stack([2 * word, 2 * word + 1], axis=-1))


@pytest.mark.parametrize(
    ("natural", "half", "size"),
    [(PAIRS, BY_ROW, 128), (packed.CHANNELS, packed.QUERY.reduce(0), 128),
     (packed.CHANNELS, packed.QUERY.reduce(0), 64)],
)  # fmt: skip
def test_a_thread_keeps_both_neighbours_of_its_row(natural, half, size):
    both = places(natural, (size,)).reshape(4, 32, -1, 2)
    one = places(half, (size // 2,)).reshape(4, 32, -1)
    np.testing.assert_array_equal(both, np.stack([2 * one, 2 * one + 1], axis=-1))


@pytest.mark.parametrize("count", [64, 128])
def test_a_thread_keeps_a_row_or_a_column_of_a_tile(count):
    own = places(encode._own(count), (count,)).reshape(4, 32, 1)
    rows = places(encode._by_row(count), (count, 32)).reshape(4, 32, -1) // 32
    columns = places(encode._by_column(count), (32, count)).reshape(4, 32, -1) % count
    np.testing.assert_array_equal(rows, np.broadcast_to(own, rows.shape))
    np.testing.assert_array_equal(columns, np.broadcast_to(own, columns.shape))


@pytest.mark.parametrize("count", [64, 128])
def test_a_warp_keeps_all_numbers_of_its_choices(count):
    warp, own = np.arange(4).reshape(4, 1, 1), places(encode._within_warps(count), (count,))
    kept = places(encode._choices(count), (encode.CHOICES, count)).reshape(4, 32, 2, -1)
    np.testing.assert_array_equal(kept // count % 4, np.broadcast_to(warp[..., None], kept.shape))
    own = own.reshape(4, 32, 1, -1)
    np.testing.assert_array_equal(kept % count, np.broadcast_to(own, kept.shape))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_unpacked_numbers_are_one_and_a_share_of_the_code(bits):
    codes = np.random.default_rng(2).integers(0, 2**bits, (64, 128))
    words = packing.pack(jnp.asarray(codes, jnp.int32), bits).T[..., None]
    for half in range(2):
        field = [f for _, f in packed._fields(bits, half) for _ in range(32 * bits // 8)]
        got = packed._unpack(words, jnp.int32(packed.ONES), half, bits, True)
        want = 1 + codes[half::2].T * 2.0 ** (np.array(field) - 10)
        np.testing.assert_array_equal(np.asarray(got, np.float64), want)


@pytest.mark.parametrize("meta", packing.META_DTYPES)
def test_scales_are_read_exactly(meta):
    low, high = jnp.float32([1.5, -3e-6, 0.0, 60000.0]), jnp.float32([-2.25, 7e-8, 1.0, -1e-3])
    pair = packing.pack_pair(high, low, meta)
    for got, want in zip(packed._affine(pair, meta), packing.unpack_pair(pair, meta), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_the_kernels_refuse():
    query = jnp.zeros((1, 9, 2, 128), jnp.bfloat16)
    key = jnp.zeros((1, 1, 132, 128), jnp.bfloat16)
    codes = {"codes": jnp.zeros((1, 1, 1, 8, 128), jnp.int32)}
    good = Affine(128, 2, 2, False, "float16")
    assert "8 tokens" in packed.refusal(query, codes, good)
    assert "8 tokens" in dense.refusal(query, key, key)
    query = query[:, :1]
    assert "128 tokens" in packed.refusal(query, codes, Affine(64, 2, 2, False, "float16"))
    assert "3 bits" in packed.refusal(query, codes, Affine(128, 3, 2, False, "float16"))
    assert "dim" in packed.refusal(query[..., :96], codes, good)
    assert "float32" in dense.refusal(query, key.astype("float32"), key.astype("float32"))
    assert "eights" in dense.refusal(query, key, key)
    assert "dim" in dense.refusal(query, key[..., :96], key[..., :96])


def test_blocks_fill_the_chip_and_are_checked():
    assert packed_blocks(1, 8, 1024, 132) == Gpu(49, 3)
    assert packed_blocks(64, 8, 1024, 132).splits == 1
    assert packed_blocks(1, 8, 8, 132).splits == 4
    assert dense_blocks(1, 8, 131072, 132) == Gpu(49, 2)
    with pytest.raises(ValueError, match="splits=0"):
        Gpu(0, 2)
    with pytest.raises(ValueError, match="stages=1"):
        Gpu(1, 1)


@pytest.mark.parametrize("columns", [4, 40])
def test_queries_come_back_in_their_places(columns):
    from kvjax.ops.mosaic_gpu import fold, unfold

    query = jax.random.normal(jax.random.key(0), (2, 2, columns, 64))
    folded, count = fold(query, 2)
    parts, width = folded.shape[2:4]
    out = folded.reshape(2, 2, 1, parts, width // 8, 8, 64).swapaxes(-1, -2)
    back = unfold(out, jnp.zeros((2, 2, 1, parts, width)), count, 2)
    np.testing.assert_allclose(back.out, query)
