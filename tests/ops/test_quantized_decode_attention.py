"""quantized_decode_attention: the TPU kernel against the reference, in Pallas's interpreters.

The GPU kernel's own interpreter is another: see test_gpu_kernels.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops import packing
from kvjax.ops.affine import Affine
from kvjax.ops.partials import Scoring
from kvjax.ops.quantized_decode_attention import tpu
from kvjax.ops.quantized_decode_attention.api import quantized_decode_attention, window_bias
from kvjax.ops.quantized_decode_attention.blocks import Tpu, tpu_blocks

STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
NAN = 0x7FFF7FFF  # two 16-bit NaN, in either format


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of the op: `made` tiles of each row, of `tiles`; the rest as in the op."""

    made: tuple[int, ...] = (2, 0, 1)
    tiles: int = 2
    kv_heads: int = 2
    group: int = 4
    dim: int = 128
    tile: int = 128
    bits: tuple[int, int] = (2, 2)
    column: bool = False
    meta: str = "bfloat16"
    tokens: int = 1
    softcap: float | None = None
    bias: int = 0  # its rows
    dtype: str = "float32"  # of queries
    blocks: Tpu | None = None  # None: a step reads all tiles

    @property
    def format(self) -> Affine:
        return Affine(self.tile, *self.bits, self.column, self.meta)

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.dim**-0.5, self.softcap)


def body(case, role, rng):
    """Tiles of entries of about unit size."""
    rows, minor = case.format.shape(role, case.dim)
    bits, lead = case.format.bits(role), (len(case.made), case.kv_heads, case.tiles)
    scale = rng.uniform(0.5, 1.5, (*lead, rows)) * 3 / 2**bits
    zero = rng.normal(size=(*lead, rows)) * 0.3 - 1.5
    codes = jnp.asarray(rng.integers(0, 2**bits, (*lead, rows, minor)), jnp.int32)
    made = {
        "codes": packing.pack(codes, bits),
        "affine": packing.pack_pair(jnp.float32(scale), jnp.float32(zero), case.meta),
    }
    if case.column:
        factor = jnp.float32(rng.uniform(0.5, 1.5, (*lead, minor)))
        made["column"] = packing.pack_halves(factor, case.meta)
    return made


def arguments(case, seed=0):
    rng = np.random.default_rng(seed)
    key, value = body(case, "key", rng), body(case, "value", rng)
    shape = (len(case.made), case.tokens, case.kv_heads * case.group, case.dim)
    query = jnp.asarray(rng.normal(size=shape), case.dtype)
    bias = None
    if case.bias:
        bias = rng.normal(size=(len(case.made), case.bias, case.tiles * case.tile))
        bias[rng.uniform(size=bias.shape) < 0.3] = -np.inf
        bias = jnp.asarray(bias, jnp.float32)
    return query, key, value, bias


def spoil(case, leaves):
    """Words that read as NaN in every slot without a tile."""
    slot = np.arange(case.tiles)[None] >= np.array(case.made)[:, None]

    def one(leaf):
        where = slot.reshape(*slot.shape[:1], 1, -1, *[1] * (leaf.ndim - 3))
        return jnp.where(where, NAN, leaf)

    return jax.tree.map(one, leaves)


def kernel(case, interpret, cut=0):
    """The kernel's answer; `cut` tokens fewer than the tiles hold."""
    query, key, value, bias = arguments(case)
    length = jnp.maximum(jnp.asarray(case.made, jnp.int32) * case.tile - cut, 0)
    heads = 2 if case.kv_heads % 2 == 0 else 1
    return tpu.attention(
        query, spoil(case, key), spoil(case, value), length, bias, format=case.format,
        scoring=case.scoring, blocks=case.blocks or Tpu(case.tiles, heads), interpret=interpret,
    )  # fmt: skip


def reference(case, cut=0):
    query, key, value, bias = arguments(case)
    made = jnp.asarray(case.made, jnp.int32)
    if cut:
        token = jnp.arange(case.tiles * case.tile)
        hidden = jnp.where(token < made[:, None] * case.tile - cut, 0.0, -jnp.inf)[:, None]
        bias = hidden if bias is None else bias + hidden
    return quantized_decode_attention(
        query, jnp.zeros(query.shape[:2], jnp.int32), key, value, made, format=case.format,
        scoring=case.scoring, bias=bias, implementation="reference",
    )  # fmt: skip


def same(got, want, case):
    """Products of the kernel round queries and probabilities to bfloat16."""
    seen = np.isfinite(want.lse)
    np.testing.assert_array_equal(np.isfinite(got.lse), seen)
    np.testing.assert_allclose(got.lse[seen], want.lse[seen], atol=1e-2)
    np.testing.assert_allclose(got.out, want.out, atol=5e-3 * float(np.abs(want.out).max()))
    assert not np.asarray(got.out)[~seen].any()


CASES = {
    "two bits": Case(),
    "column, float16": Case(column=True, meta="float16", made=(2, 1), tiles=2),
    "SmolLM2, verification": Case(
        kv_heads=3, group=3, dim=64, tokens=3, bias=3, softcap=2.0, made=(2, 1), tiles=3
    ),
}
SLOW = {
    "SmolLM2": Case(kv_heads=3, group=3, dim=64, meta="float16", made=(2, 1), tiles=3),
    "verification": Case(tokens=3, bias=3, softcap=2.0, made=(2, 1), tiles=2),
    **{f"{k} and {v} bits": Case(bits=(k, v), made=(3, 2), tiles=3)
       for k, v in ((1, 2), (3, 4), (4, 3), (8, 8), (2, 1))},
    "small tiles": Case(tile=64, made=(7, 3), tiles=8),
    "small tiles and heads": Case(tile=64, dim=64, kv_heads=3, bits=(4, 2), column=True),
    "five tiles": Case(made=(5, 0, 2), tiles=5),
    "one query head each": Case(group=1, kv_heads=4),
    "eight tokens": Case(tokens=8, bias=1, dtype="bfloat16"),
    "one KV head": Case(kv_heads=1, group=8, meta="float16"),
    "steps, the last one short": Case(tiles=21, made=(21, 9, 8, 0), blocks=Tpu(8, 2)),
    "splits and programs": Case(tiles=21, made=(21, 3, 0), blocks=Tpu(8, 1, 2, 4), column=True),
    "more programs than rows": Case(tiles=3, made=(3,), blocks=Tpu(3, 2, 1, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(name):
    same(kernel(CASES[name], interpret=True), reference(CASES[name]), CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_kernel_equals_the_reference_everywhere(name):
    same(kernel(SLOW[name], interpret=True), reference(SLOW[name]), SLOW[name])


def test_no_races_and_nothing_unwritten_is_read():
    case = Case(made=(9, 0), tiles=9, kv_heads=1, group=8, blocks=Tpu(8, 1))
    same(kernel(case, STRICT), reference(case), case)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES | SLOW)
def test_no_races_anywhere(name):
    case = (CASES | SLOW)[name]
    same(kernel(case, STRICT), reference(case), case)


def test_a_length_may_end_within_a_tile():
    case = Case(made=(2, 1), kv_heads=1, group=8)
    same(kernel(case, True, cut=37), reference(case, cut=37), case)


def test_a_bias_of_minus_infinity_hides_everything():
    case = Case(made=(1,), tiles=1, kv_heads=1)
    query, key, value, _ = arguments(case)
    got = tpu.attention(
        query, key, value, jnp.array([128]), jnp.full((1, 1, 128), -jnp.inf), format=case.format,
        scoring=case.scoring, blocks=Tpu(1, 1), interpret=True,
    )  # fmt: skip
    assert not np.asarray(got.out).any() and np.isneginf(got.lse).all()


@pytest.mark.parametrize("meta", ["float16", "bfloat16"])
def test_pairs_of_16_bits_become_float32(meta):
    """Subnormals, both zeros, the largest numbers."""
    numbers = np.array([0.0, -0.0, 1.0, -1.5, 2.0**-14, 2.0**-24, -3 * 2.0**-24, 65504.0, -65504.0,
                        1e-3, 6.1e-5, 2.0**-15], np.float32)  # fmt: skip
    high, low = jnp.asarray(numbers), jnp.asarray(numbers[::-1].copy())
    words = packing.pack_pair(high, low, meta)[None]
    want = packing.unpack_pair(words, meta)
    for got, exact in zip(tpu._pair(words, meta), want, strict=True):
        np.testing.assert_array_equal(got, exact)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(exact))


@pytest.mark.slow
def test_a_window_over_reused_slots_is_a_bias():
    case = Case(made=(7, 2), tiles=4, kv_heads=1, group=8)
    query, key, value, _ = arguments(case)
    made = jnp.asarray(case.made)
    positions = (made * 128 + 3)[:, None]
    want = quantized_decode_attention(
        query, positions, key, value, made, format=case.format, scoring=case.scoring, first=4,
        window=300, implementation="reference",
    )  # fmt: skip
    bias = window_bias(positions, made, 4, 128, 4, 300)
    got = tpu.attention(
        query, key, value, jnp.minimum(made, 4) * 128, bias, format=case.format,
        scoring=case.scoring, blocks=Tpu(4, 1), interpret=True,
    )  # fmt: skip
    same(got, want, case)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(tokens=9), "9 new tokens"),
        (Case(dim=32), "head_dim 32"),
        (Case(tile=32), "tile=32"),
    ],
)
def test_what_the_kernel_refuses(case, reason):
    query, key, value, _ = arguments(case)
    with pytest.raises(ValueError, match=reason):
        quantized_decode_attention(
            query, jnp.zeros(query.shape[:2], jnp.int32), key, value, jnp.asarray(case.made),
            format=case.format, scoring=case.scoring, implementation="tpu",
        )  # fmt: skip


def test_blocks_are_validated():
    with pytest.raises(ValueError, match="heads=2 must divide the 3 KV heads"):
        Tpu(8, 2).check(3, 8)
    with pytest.raises(ValueError, match="tiles=12 must be all 16 tiles"):
        Tpu(12, 1).check(4, 16)
    with pytest.raises(ValueError, match="splits=0"):
        Tpu(8, 1, 0)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "tiles", "cores", "want"),
    [
        (8, 8, 32, 1, Tpu(32, 2)),
        (8, 8, 256, 1, Tpu(64, 2)),
        (1, 1, 256, 2, Tpu(128, 1, 2, 2)),  # one row: the cores share its context
        (1, 3, 5, 1, Tpu(5, 1)),
        (8, 8, 37, 2, Tpu(32, 2, 1, 2)),
    ],
)
def test_blocks_follow_the_shape(batch, kv_heads, tiles, cores, want):
    got = tpu_blocks(batch, kv_heads, tiles, 128, 9216, 4096, cores)
    assert got == want
    got.check(kv_heads, tiles)
