"""Every implementation of encode_tile against the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops import packing
from kvjax.ops.affine import Affine
from kvjax.ops.encode_tile import api, gpu, heed, reference, tpu
from kvjax.ops.encode_tile.blocks import Blocks, largest_divisor
from kvjax.ops.encode_tile.heed import Heed
from kvjax.ops.encode_tile.reference import Kvarn

STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
GPU = plgpu.InterpretGPUParams(detect_races=True)


def tiles(lead, tokens, dim, dtype=np.float32, seed=0):
    """Channels and tokens of unlike size; zero tokens in the second tile, the third constant."""
    rng = np.random.default_rng([seed, tokens, dim])
    x = rng.normal(size=(*lead, tokens, dim)) * np.exp(rng.normal(size=(*lead, 1, dim)))
    x *= np.exp(0.5 * rng.normal(size=(*lead, tokens, 1)))
    flat = x.reshape(-1, tokens, dim)
    if len(flat) > 2:
        flat[1, ::7], flat[2] = 0, -1.5
    return jnp.asarray(flat.reshape(x.shape), dtype)


def agree(got, wanted, x, role, bits, meta_dtype, column):
    """Leaves of one shape and dtype, at most one code in a thousand off by one, one set of values.

    Rounds of the balance that tie within float32 noise may be chosen either way: their scales
    differ, their products only by what 16 bits round away.
    """
    tokens, dim = x.shape[-2:]
    format = Affine(tokens, bits, bits, column, meta_dtype)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(
        lambda a: (a.shape, a.dtype), wanted
    )
    codes = [np.asarray(format.unpack(tile, role, dim)["codes"]) for tile in (got, wanted)]
    differ = np.abs(codes[0] - codes[1])
    assert differ.max() <= 1 and differ.mean() <= 1e-3
    decoded = [np.asarray(format.decode(tile, role, dim)) for tile in (got, wanted)]
    error = np.linalg.norm(decoded[0] - decoded[1], axis=(-1, -2))
    size = np.linalg.norm(decoded[1], axis=(-1, -2))
    noise = 1e-2 if meta_dtype == "bfloat16" else 3e-3
    assert (error <= noise * size + 1e-6).all()


@partial(jax.jit, static_argnums=(1, 2))
def defined(x, role, options):
    return reference.kvarn_tile(x, role, options)


CASES = [  # (role, tokens, dim, dtype, options)
    ("key", 128, 64, np.float32, Kvarn(2, iterations=2)),
]
SLOW_SHAPES = [(128, 128, jnp.bfloat16, bits) for bits in packing.WIDTHS] + [
    (128, 64, np.float32, 2),
    (64, 128, np.float32, 2),
    (64, 64, jnp.bfloat16, 2),
]
SLOW_CASES = [
    ("value", 64, 128, jnp.bfloat16, Kvarn(4, 1, meta_dtype="bfloat16", normalize_tile=True)),
    ("key", 64, 16, np.float32, Kvarn(3, iterations=0, rotate=False)),
] + [
    (role, tokens, dim, dtype, Kvarn(bits))
    for role in ("key", "value")
    for tokens, dim, dtype, bits in SLOW_SHAPES
]


@pytest.mark.parametrize(
    ("role", "tokens", "dim", "dtype", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_tpu_kernel_equals_the_reference(role, tokens, dim, dtype, options):
    x = tiles((1, 3), tokens, dim, dtype)
    got = tpu.kvarn_tile(x, role, options, interpret=True)
    agree(got, defined(x, role, options), x, role, options.bits, options.meta_dtype, True)


@pytest.mark.parametrize("role", ["key", pytest.param("value", marks=pytest.mark.slow)])
def test_tpu_kernel_reads_and_writes_in_bounds(role):
    """Under the interpreter that finds races, reads out of bounds and uninitialised memory."""
    x, options = tiles((3,), 32, 32), Kvarn(2, iterations=1)
    got = tpu.kvarn_tile(x, role, options, Blocks(1), interpret=STRICT)
    agree(got, defined(x, role, options), x, role, 2, "float16", True)


GPU_CASES = [("key", 64, jnp.bfloat16, Kvarn(2, iterations=1))]
SLOW_GPU_CASES = [
    ("key", 64, jnp.float16, Kvarn(4, 2, meta_dtype="bfloat16")),
    ("value", 64, jnp.bfloat16, Kvarn(3, iterations=0, rotate=False)),
    ("key", 128, jnp.bfloat16, Kvarn(2)),
    ("key", 128, jnp.bfloat16, Kvarn(1)),
    ("value", 128, jnp.bfloat16, Kvarn(2)),
    ("value", 128, jnp.bfloat16, Kvarn(3)),
    ("value", 128, jnp.bfloat16, Kvarn(8)),
]


@pytest.mark.parametrize(
    ("role", "dim", "dtype", "options"),
    [*GPU_CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_GPU_CASES)],
)
def test_gpu_kernel_equals_the_reference(role, dim, dtype, options):
    x = tiles((1, 3), 128, dim, dtype)
    assert gpu.kvarn_refusal(x, options) == ""
    got = gpu.kvarn_tile(x, role, options, interpret=GPU)
    agree(got, defined(x, role, options), x, role, options.bits, options.meta_dtype, True)


@partial(jax.jit, static_argnums=(1, 2))
def fitted(x, role, options, query):
    return heed.heed_tile(x, role, options, query)


def queries(lead, count, dim, dtype=np.float32, seed=1):
    rng = np.random.default_rng([seed, count, dim])
    q = rng.normal(size=(*lead, count, dim)) * np.exp(rng.normal(size=(*lead, 1, dim)))
    q.reshape(-1, count, dim)[-1] = 0  # no query at all: channels do not heed each other
    return jnp.asarray(q, dtype)


def power_of_error(decoded, x, weight):
    """eᵀ W e summed over tokens, per tile."""
    error = np.asarray(decoded) - np.asarray(reference.hadamard.rotate(x))
    return np.einsum("...cd,...de,...ce->...", error, weight, error)


def agree_in_turn(got, wanted, x, role, options, query):
    """Most tiles equal throughout. Where one code falls on the other side of a tie, all rows after
    it have other targets, and what is the same is the size of the error that counts, up to what a
    row's 16 bits round away."""
    tokens, dim = x.shape[-2:]
    format = Affine(tokens, options.bits, options.bits, False, options.meta_dtype)
    count = x.size // (tokens * dim)
    same = np.stack([np.asarray(got[n] == wanted[n]).reshape(count, -1).all(-1) for n in wanted])
    assert same.all(axis=0).mean() >= 0.5
    weight = np.eye(dim)
    if query is not None:
        turned = np.asarray(reference.hadamard.rotate(query))
        weight = np.einsum("...nd,...ne->...de", turned, turned)
    errors = [power_of_error(format.decode(tile, role, dim), x, weight) for tile in (got, wanted)]
    half = float(jnp.finfo(options.meta_dtype).eps) / 2
    rounded = dim * half**2 * power_of_error(0, x, weight)
    assert (np.abs(errors[0] - errors[1]) <= 0.15 * errors[1] + rounded + 1e-6).all()


class OneClip(Heed):
    """One share of the range in place of five: half the program to compile."""

    @property
    def clips(self):
        return (0.8,)


HEED_CASES = [  # (role, tokens, dim, dtype, options, queries a tile)
    ("key", 64, 16, np.float32, OneClip(2), 96),
    ("value", 32, 64, jnp.bfloat16, Heed(4, "bfloat16"), 0),
]
SLOW_HEED_CASES = [
    ("key", 64, 16, np.float32, Heed(2), 96),
    ("key", 40, 16, np.float32, Heed(8, sweeps=1, own_share=0.2), 96),
    ("key", 64, 64, np.float32, Heed(3), 0),
    ("value", 32, 32, np.float32, Heed(8, coupling=0.0), 0),
] + [
    (role, tokens, dim, dtype, Heed(bits), 256)
    for role in ("key", "value")
    for tokens, dim, dtype, bits in SLOW_SHAPES
]


@pytest.mark.parametrize(
    ("role", "tokens", "dim", "dtype", "options", "count"),
    [*HEED_CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_HEED_CASES)],
)
def test_tpu_kernel_of_heed_equals_the_reference(role, tokens, dim, dtype, options, count):
    x = tiles((1, 4), tokens, dim, dtype)
    query = queries((1, 4), count, dim, dtype) if count and role == "key" else None
    got = tpu.heed_tile(x, role, options, query, Blocks(2), interpret=True)
    wanted = fitted(x, role, options, query)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)
    if role == "value":  # zero tokens
        format = Affine(tokens, options.bits, options.bits, False, options.meta_dtype)
        assert not np.any(format.decode(got, role, dim)[0, 1, ::7])
    agree_in_turn(got, wanted, x, role, options, query)


GPU_HEED_CASES = [("value", 64, jnp.bfloat16, OneClip(4, "bfloat16"), 0)]
SLOW_GPU_HEED_CASES = [
    ("key", 64, jnp.bfloat16, Heed(2), 96),
    ("key", 128, jnp.float16, Heed(3, sweeps=1), 256),
    ("key", 64, jnp.bfloat16, Heed(8, sweeps=0, own_share=0.2), 96),
    ("key", 64, jnp.bfloat16, Heed(1), 0),
    ("value", 128, jnp.bfloat16, Heed(2), 0),
    ("value", 64, jnp.bfloat16, Heed(3, coupling=0.0), 0),
]


@pytest.mark.parametrize(
    ("role", "dim", "dtype", "options", "count"),
    [*GPU_HEED_CASES, *(pytest.param(*case, marks=pytest.mark.slow)
                        for case in SLOW_GPU_HEED_CASES)],
)  # fmt: skip
def test_gpu_kernel_of_heed_equals_the_reference(role, dim, dtype, options, count):
    x = tiles((1, 4), 128, dim, dtype)
    query = queries((1, 4), count, dim, dtype) if count else None
    assert gpu.refusal(x) == ""
    got = gpu.heed_tile(x, role, options, query, interpret=GPU)
    wanted = fitted(x, role, options, query)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)
    agree_in_turn(got, wanted, x, role, options, query)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["key", "value"])
def test_tpu_kernel_of_heed_reads_and_writes_in_bounds(role):
    x, options, query = tiles((4,), 16, 16), Heed(2), queries((4,), 24, 16)
    query = query if role == "key" else None
    got = tpu.heed_tile(x, role, options, query, Blocks(2), interpret=STRICT)
    agree_in_turn(got, fitted(x, role, options, query), x, role, options, query)


def test_leading_axes_are_tiles():
    x, options = tiles((2, 3), 32, 16), Kvarn(2, iterations=0)
    got = tpu.kvarn_tile(x, "key", options, interpret=True)
    one = tpu.kvarn_tile(x[1, 2], "key", options, interpret=True)
    assert got["codes"].shape == (2, 3, 1, 32) and one["affine"].shape == (16,)
    np.testing.assert_array_equal(got["codes"][1, 2], one["codes"])


@pytest.mark.parametrize("bits", packing.WIDTHS)
@pytest.mark.parametrize("rows", [64, 128])
def test_packing_by_matrix_product_is_exact(bits, rows):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (rows, 16))
    got = jax.jit(tpu._pack, static_argnums=1)(jnp.asarray(codes, jnp.float32), bits)
    np.testing.assert_array_equal(got, packing.pack(jnp.asarray(codes), bits))


@pytest.mark.parametrize("meta_dtype", packing.META_DTYPES)
def test_sixteen_bits_by_whole_number_arithmetic(meta_dtype):
    """Every 16-bit pattern's number, its neighbours, and the ties between it and the next."""
    half = np.arange(0x7C00 if meta_dtype == "float16" else 0x7F80, dtype=np.uint16)
    exact = half.view(jnp.dtype(meta_dtype)).astype(np.float32)
    normal = exact[exact > 1e-37]  # float32 below that is flushed to zero on devices
    ties = (normal[:-1].astype(np.float64) + normal[1:]) / 2
    x = np.concatenate([[0.0], normal, ties, ties * (1 + 1e-7), ties * (1 - 1e-7), [1e30, 3.4e38]])
    x = np.concatenate([x, -x]).astype(np.float32)
    wanted = packing.pack_pair(jnp.asarray(x), jnp.asarray(x), meta_dtype)
    got = jax.jit(tpu._pair, static_argnums=2)(x, x, meta_dtype)
    np.testing.assert_array_equal(got, wanted)


def test_blocks():
    assert [largest_divisor(total, 4) for total in (1, 6, 7, 8)] == [1, 3, 1, 4]
    with pytest.raises(ValueError, match="blocks.tiles=3 must be a divisor of .* tiles, 4"):
        tpu.kvarn_tile(tiles((4,), 32, 16), "key", Kvarn(2), Blocks(3), interpret=True)


def test_what_a_kernel_cannot_take_is_said():
    x = tiles((1,), 32, 16)
    with pytest.raises(ValueError, match="'tpu' cannot run here: clip needs"):
        api.kvarn_tile(x, "key", Kvarn(2, clip=0.01), implementation="tpu")
    with pytest.raises(ValueError, match="'tpu' cannot run here: scale_bits=8"):
        api.kvarn_tile(x, "key", Kvarn(2, scale_bits=8), implementation="tpu")
    with pytest.raises(ValueError, match="tiles of 30 tokens"):
        api.kvarn_tile(x[:, :30], "key", Kvarn(2), implementation="tpu")
    for shape in ((1024, 128), (64, 1024)):
        with pytest.raises(ValueError, match="is too large for the vector memory"):
            api.heed_tile(jnp.zeros(shape), "key", Heed(2), implementation="tpu")
    with pytest.raises(ValueError, match="'gpu' cannot run here: tiles must have 128 tokens"):
        api.kvarn_tile(x, "key", Kvarn(2), implementation="gpu")
    with pytest.raises(ValueError, match="must be bfloat16 or float16, not float32"):
        api.heed_tile(jnp.zeros((128, 64)), "key", Heed(2), implementation="gpu")
    for options in (Kvarn(2, clip=0.01), Kvarn(2, scale_bits=8), Kvarn(2, normalize_tile=True)):
        with pytest.raises(ValueError, match="'gpu' cannot run here: .*(clip|scale_bits|normal)"):
            api.kvarn_tile(x, "key", options, implementation="gpu")


def test_what_nothing_can_encode_raises():
    x = tiles((1,), 32, 16)
    with pytest.raises(ValueError, match="role='keys' is unknown"):
        api.kvarn_tile(x, "keys", Kvarn(2))
    with pytest.raises(ValueError, match="bits=5"):
        api.kvarn_tile(x, "key", Kvarn(5))
    with pytest.raises(ValueError, match="even C and D"):
        api.kvarn_tile(x[:, :31], "key", Kvarn(2))
    with pytest.raises(ValueError, match="head_dim=12 is no power of two"):
        api.kvarn_tile(x[..., :12], "key", Kvarn(2))
