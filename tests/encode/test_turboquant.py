from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import encode
from kvjax.encode.turboquant import TurboQuant
from tests.encode.contract import (
    attention_error,
    check_contract,
    check_extremes,
    check_flush,
    peer_tiles,
    peers,
    relative,
    run,
)

KINDS = ("gauss", "const", "zeros", "rope")
FIRST = 64  # tokens whose codes are stored


@dataclass(frozen=True)
class Reference(TurboQuant):
    """With the matrices and codebooks of the reference."""

    def rotation(self, dim):
        return jnp.asarray(peers()["d64/tq/Pi"])

    def sketch(self, dim):  # ours meets the residual after the rotation
        return jnp.asarray(peers()["d64/tq/S"] @ peers()["d64/tq/Pi"].T)

    def centroids(self, bits):
        return tuple(float(c) for c in peers()[f"d64/tq/centroids_b{bits}"] * 8)


@dataclass(frozen=True)
class Fixed(TurboQuant):
    """Rotations that compile in no time."""

    def rotation(self, dim):
        matrix = np.random.default_rng(dim).normal(size=(dim, dim))
        return jnp.asarray(np.linalg.qr(matrix)[0], jnp.float32)

    def sketch(self, dim):
        return jnp.asarray(np.random.default_rng(1).normal(size=(dim, dim)), jnp.float32)


def all_kinds(role):
    return np.concatenate([peer_tiles(64, kind, role) for kind in KINDS])  # [8, 128, 64]


def by_kind(x):
    """[8, 128, ...] as one [256, ...] a kind."""
    x = np.asarray(x)
    return dict(zip(KINDS, x.reshape(len(KINDS), 256, *x.shape[2:]), strict=True))


@pytest.fixture(scope="module")
def encoded():
    """(plain, decoded) by kind, made once for every width."""
    made = {}

    def make(bits, role, product=False):
        if (bits, role, product) not in made:
            encoder = Reference(key_bits=bits, value_bits=bits, product=product)
            _, plain, decoded = run(encoder, all_kinds(role), role)
            plain = {name: by_kind(leaf) for name, leaf in plain.items()}
            made[bits, role, product] = plain, by_kind(decoded)
        return made[bits, role, product]

    return make


def reference(kind, name):
    return peers()[f"d64/{kind}/tq/{name}"]


@pytest.mark.parametrize("bits", [2, 4])
def test_mse_matches_the_reference(golden, encoded, bits):
    """Codes are equal but for zero tokens, where all are a tie; norms are kept in 16 bits."""
    key, value = encoded(bits, "key"), encoded(bits, "value")
    for kind in KINDS:
        np.testing.assert_allclose(key[0]["norm"][kind], reference(kind, "k_norm"), rtol=5e-4)
        np.testing.assert_allclose(value[0]["norm"][kind], reference(kind, "v_norm"), rtol=5e-4)
        there = reference(kind, "k_norm")[:FIRST] > 0
        codes = key[0]["codes"][kind][:FIRST]
        np.testing.assert_array_equal(codes[there], reference(kind, f"k_mse{bits}_idx")[there])
        wanted = reference(kind, f"attn_mse{bits}")
        assert attention_error(golden, 64, kind, key[1][kind], value[1][kind], wanted) < 2e-3
    if bits == 2:
        there = reference("rope", "v_norm")[:FIRST] > 0
        codes = value[0]["codes"]["rope"][:FIRST]
        np.testing.assert_array_equal(codes[there], reference("rope", "v_mse2_idx")[there])


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_product_matches_the_reference(golden, encoded, bits):
    key, value = encoded(bits, "key", product=True), encoded(bits, "value")
    assert ("codes" in key[0]) == (bits > 1) == ("residual_norm" in key[0])
    for kind in KINDS:
        there = reference(kind, "k_norm") > 0
        signs = golden.codes(reference(kind, f"k_prod{bits}_signbits"), 1)
        differ = (key[0]["signs"][kind][:FIRST] != signs)[there[:FIRST]]
        assert differ.mean() < 1e-3  # a sign of nearly zero
        if bits > 1:
            idx = reference(kind, f"k_mse{bits - 1}_idx")
            same = (key[0]["codes"][kind][:FIRST] == idx)[there[:FIRST]]
            assert same.all()
            rest, wanted = key[0]["residual_norm"][kind], reference(kind, f"k_prod{bits}_rnorm")
            np.testing.assert_allclose(rest[there], wanted[there], rtol=1e-3)
        if kind in ("gauss", "rope") and bits > 1:
            query = golden.rotated[f"d64/{kind}/q"][0, :4].astype(np.float64)
            scores = query @ key[1][kind].T / 8
            assert relative(scores, reference(kind, f"prod{bits}_scores")) < 1e-3
        wanted = reference(kind, f"attn_prod{bits}")
        assert attention_error(golden, 64, kind, key[1][kind], value[1][kind], wanted) < 5e-3


def test_scores_are_unbiased_with_the_sketch_and_too_small_without(encoded):
    x = by_kind(all_kinds("key").astype(np.float64))["gauss"]
    slope = {
        (bits, product): (encoded(bits, "key", product)[1]["gauss"] * x).sum() / (x * x).sum()
        for bits, product in ((2, False), (1, True), (2, True))
    }
    assert slope[2, False] == pytest.approx(1 - 0.117, abs=0.01)
    assert slope[1, True] == pytest.approx(1.0, abs=0.02)
    assert slope[2, True] == pytest.approx(1.0, abs=0.02)


def test_the_rotation_is_orthogonal_and_the_seeds_own():
    x = np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32)

    @jax.jit
    def draw():
        encoders = [encode.turboquant(seed=seed) for seed in (0, 1)]
        return [e.rotation(20) for e in encoders], encoders[0].rotate(jnp.asarray(x), "key")

    (first, other), turned = jax.tree.map(np.asarray, draw())
    np.testing.assert_allclose(first @ first.T, np.eye(20), atol=1e-5)
    assert np.abs(first - other).max() > 0.3
    np.testing.assert_allclose(turned, x @ first.T, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the name of LAPACK's QR")
def test_layers_share_one_draw_of_the_rotation():
    encoder = encode.turboquant()

    def layers(x):
        for _ in range(3):
            x = encoder.unrotate(jnp.tanh(encoder.rotate(x, "key")), "value")
        return x

    program = jax.jit(layers).lower(jnp.zeros((2, 64))).compile().as_text()
    assert program.count('custom_call_target="lapack_sgeqrf_ffi"') == 1
    assert len(program) < 150_000  # a stored matrix of 4096 numbers is 40 kB a piece


def test_outliers_get_their_bit(stream):
    x = np.asarray(stream[0])[:, :32].swapaxes(1, 2)  # channel 5 is ten times the others
    plain = run(Fixed(tile=32, key_bits=2, value_bits=2), x, "key")[2]
    encoder = Fixed(tile=32, key_bits=2, value_bits=2, outliers=32)
    _, parts, decoded = run(encoder, x, "key")
    check_extremes(encoder, x, "key")
    assert parts["high_codes"].shape == parts["low_codes"].shape == (2, 2, 32, 32)
    assert int(parts["high_codes"].max()) == 7 and int(parts["low_codes"].max()) == 3
    np.testing.assert_array_equal(np.asarray(parts["outlier"]).sum(axis=-1), 32)
    assert (np.asarray(parts["outlier"])[..., 5] == 1).all()
    others = np.arange(64) != 5
    assert relative(decoded, x) < 0.6 * relative(plain, x)
    assert relative(decoded[..., others], x[..., others]) < relative(
        plain[..., others], x[..., others]
    )


def test_keeps_the_contract(stream):
    check_contract(Fixed(tile=32, product=True), stream, worst=0.6)


def test_what_is_drawn_inside_a_larger_program_is_the_same(stream):
    encoder = encode.turboquant(tile=32, product=True)
    check_flush(encoder, np.asarray(stream[0]).swapaxes(1, 2))


@pytest.mark.parametrize("product", [False, True])
@pytest.mark.parametrize("role", ["key", "value"])
def test_bytes_of_the_parts_are_those_of_the_arrays(role, product):
    for tile, dim, outliers in ((32, 64, 32), (64, 80, 16), (128, 128, 32)):
        encoder = Fixed(tile=tile, key_bits=2, product=product, outliers=outliers)
        leaves = jax.eval_shape(
            lambda x, encoder=encoder: encoder.encode_tile(x, role),
            jax.ShapeDtypeStruct((tile, dim), jnp.float32),
        )
        measured = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
        assert measured == encoder.tile_bytes(role, dim)


def test_bits_per_element():
    plain = encode.turboquant(2, 3)
    assert plain.bits_per_element("key", 128) == 2 + 16 / 128
    assert plain.bits_per_element("value", 64) == 3 + 16 / 64
    product = encode.turboquant(2, 3, product=True)
    assert product.bits_per_element("key", 64) == 2 + 32 / 64
    assert product.bits_per_element("value", 64) == 3 + 16 / 64
    assert encode.turboquant(1, 1, product=True).bits_per_element("key", 64) == 1.25
    fraction = encode.turboquant(2, 2, outliers=32)  # the paper's "2.5 bits"
    assert fraction.bits_per_element("key", 128) == 2.25 + 2 * 16 / 128 + 1 / 128


def test_what_cannot_be_encoded_raises_with_a_remedy():
    with pytest.raises(ValueError, match="key_bits=8 has no codebook: choose one of"):
        encode.turboquant(key_bits=8)
    with pytest.raises(ValueError, match="value_bits=4 leaves no bit more for outliers=8"):
        encode.turboquant(value_bits=4, outliers=8)
    with pytest.raises(ValueError, match="outliers=-1 must be 0"):
        encode.turboquant(outliers=-1)
    with pytest.raises(ValueError, match="outliers=63 must leave at least 2 of head_dim=64"):
        encode.turboquant(outliers=63).validate(64)
    with pytest.raises(ValueError, match="head_dim=1 has nothing to rotate"):
        encode.turboquant().validate(1)
    encode.turboquant().validate(80)  # no power of two is needed
    with pytest.raises(ValueError, match="meta_dtype='int8' is not supported"):
        encode.turboquant(meta_dtype="int8")
