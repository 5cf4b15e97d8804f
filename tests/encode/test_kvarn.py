from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import encode
from kvjax.ops.encode_tile.reference import balance

# Kinds of tests/golden/quant by head dim and tile; those with unstable tiles last.
CASES = {
    (64, 128): ["gauss", "tok", "small", "rope", "const", "zeros"],
    (64, 64): ["gauss", "rope"],
    (128, 128): ["gauss", "kchan", "small", "zeros"],
}
every_case = pytest.mark.parametrize(("dim", "tile"), CASES)
every_role = pytest.mark.parametrize("role", ["key", "value"])


@partial(jax.jit, static_argnums=(0, 2))
def encode_and_decode(encoder, x, role):
    tile = encoder.encode_tile(x, role)
    plain = encoder.unpack_tile(tile, role, x.shape[-1])
    return tile, plain, encoder.decode_tile(tile, role, x.shape[-1])


@jax.jit
def balanced(rows, iterations):
    return balance(rows, iterations)


def rows_of(x, role):
    return np.asarray(x).swapaxes(-1, -2) if role == "key" else np.asarray(x)


class Case:
    """All tiles of a (dim, tile, role), ours and the reference's, kinds one after another."""

    def __init__(self, golden, dim, tile, role, bits):
        self.golden, self.kinds, self.role, self.bits = golden, CASES[dim, tile], role, bits
        self.prefix, self.letter, self.dim, self.tile = f"d{dim}/", role[0], dim, tile
        self.x = np.concatenate([golden.tiles(dim, kind, role, tile) for kind in self.kinds])
        encoder = encode.kvarn(bits, bits, tile=tile, rotate=False)
        _, plain, self.decoded = jax.tree.map(np.asarray, encode_and_decode(encoder, self.x, role))
        self.codes, self.column = plain["codes"], plain["column"]
        self.scale, self.zero = plain["scale"], plain["zero"]

    def reference(self, name):
        """[tiles, ...] of every kind; ``name`` after the letter, such as "_agree" or "2_a"."""
        arrays = [
            self.golden.kvarn[f"{self.prefix}{kind}/g{self.tile}/{self.letter}{name}"]
            for kind in self.kinds
        ]
        return np.concatenate([a.reshape(-1, *a.shape[3:]) for a in arrays])

    def reference_codes(self):
        return self.golden.codes(self.reference(f"{self.bits}_packed"), self.bits)

    def reference_decoded(self):
        scale, zero = (self.reference(f"{self.bits}_{n}").astype(np.float32) for n in "az")
        column = self.reference("_r" if self.role == "key" else "_c").astype(np.float32)
        rows = self.reference_codes() * scale[..., None] + zero[..., None]
        return rows_of(rows * column[:, None], self.role)

    def stable(self):
        return self.reference("_agree") >= 0.999


@pytest.fixture(scope="module")
def case(golden):
    made = {}

    def make(dim, tile, role, bits):
        key = dim, tile, role, bits
        return made.setdefault(key, None) or made.__setitem__(key, Case(golden, *key)) or made[key]

    return make


@every_role
@every_case
@pytest.mark.parametrize("bits", [2, 4])
def test_codes_equal_the_reference_on_stable_tiles(case, dim, tile, role, bits):
    ours = case(dim, tile, role, bits)
    stable, codes = ours.stable(), ours.reference_codes()
    assert stable.sum() >= len(stable) // 2
    differ = np.abs(ours.codes - codes.astype(np.int32))[stable]
    assert differ.max() <= 1
    assert (differ == 0).mean(axis=(-1, -2)).min() >= 0.999


@every_role
@every_case
@pytest.mark.parametrize("bits", [2, 4])
def test_values_equal_the_reference_where_codes_match(case, dim, tile, role, bits):
    """To 1e-5 where the same round was chosen, else to the 16 bits of three scales.

    Once a tile is balanced, rounds tie within float32 noise; another round has other scales with
    the same products, which round differently to 16 bits.
    """
    ours = case(dim, tile, role, bits)
    wanted = ours.reference_decoded()
    same_code = rows_of(ours.codes == ours.reference_codes(), role)
    size = np.maximum(np.abs(wanted).max(axis=(-1, -2), keepdims=True), 1e-30)
    error = np.where(same_code, np.abs(ours.decoded - wanted) / size, 0.0)
    column = ours.reference("_r" if role == "key" else "_c").astype(np.float32)
    same_round = (np.abs(ours.column / column - 1) < 1e-3).all(axis=-1) & (
        (ours.column == column).mean(axis=-1) > 0.95
    )
    stable = ours.stable()
    assert error[stable].max() < 3e-3
    assert (stable & same_round).sum() >= 2
    # A scale on the border of two 16-bit numbers may still round the other way, for its whole row.
    assert (error[stable & same_round] < 1e-5).mean() >= 0.995


@every_role
@every_case
def test_scales_equal_the_reference_up_to_one_factor_a_tile(case, dim, tile, role):
    """Before rounding to 16 bits, whichever of the tying rounds was chosen.

    With a zero token the imbalance is near 1e8, and float32 cannot tell unlike rounds apart.
    """
    ours = case(dim, tile, role, 4)
    comparable = ours.stable() & (ours.reference("_imb")[..., 1] < 1e6)
    assert comparable.sum() >= 4
    row_scale, column_scale = (
        np.asarray(s, np.float64) for s in balanced(rows_of(ours.x, role), 8)
    )
    wanted = ours.reference("_sr")[..., None] * ours.reference("_sc")[..., None, :]
    ratio = (row_scale * column_scale / wanted)[comparable]
    spread = ratio.max(axis=(-1, -2)) / ratio.min(axis=(-1, -2)) - 1
    assert spread.max() < 2e-5
    after = np.asarray(ours.x, np.float64)
    after = rows_of(after, role) / row_scale / column_scale
    stds = [after.std(axis=axis, ddof=1) for axis in (-1, -2)]
    imbalance = sum(std.max(-1) / np.maximum(std.min(-1), 1e-8) for std in stds)
    wanted_imbalance = ours.reference("_imb")[..., 1]
    np.testing.assert_allclose(imbalance[comparable], wanted_imbalance[comparable], rtol=1e-5)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("dim", "count"), [(64, 4), (128, 1)])
def test_errors_equal_the_references_on_unstable_tiles(case, dim, count, bits):
    ours = case(dim, 128, "value", bits)  # all key tiles are stable
    unstable = ~ours.stable()
    assert unstable.sum() == count
    error = np.linalg.norm(ours.decoded - ours.x, axis=(-1, -2))[unstable]
    wanted = np.linalg.norm(ours.reference_decoded() - ours.x, axis=(-1, -2))[unstable]
    np.testing.assert_allclose(error, wanted, rtol=0.12, atol=1e-6)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 2), (4, 2), (4, 4)])
@every_case
def test_attention_outputs_equal_the_references(case, golden, dim, tile, key_bits, value_bits):
    key, value = case(dim, tile, "key", key_bits), case(dim, tile, "value", value_bits)
    start = 0
    for kind in key.kinds:
        stop = start + len(golden.tiles(dim, kind, "key", tile))
        if key.stable()[start:stop].all() and value.stable()[start:stop].all():
            out = golden.attention(dim, kind, key.decoded[start:stop], value.decoded[start:stop])
            wanted = golden.kvarn[f"d{dim}/{kind}/g{tile}/attn_k{key_bits}v{value_bits}"][0]
            # 16-bit scales of another round of a tie move a score by about 1e-3.
            assert np.linalg.norm(out - wanted) < 1e-2 * np.linalg.norm(wanted), kind
        start = stop


@pytest.mark.parametrize(("normalize_tile", "wanted"), [(False, 0.7357817), (True, 0.4359135)])
def test_tile_normalisation_helps_keys_below_the_floor(golden, normalize_tile, wanted):
    """Relative errors on `small` at D=128, 2 bits, measured with the reference code."""
    encoder = encode.kvarn(2, 2, normalize_tile=normalize_tile, rotate=False)
    x = golden.tiles(128, "small", "key", 128)
    decoded = encode_and_decode(encoder, x, "key")[2]
    assert np.linalg.norm(decoded - x) / np.linalg.norm(x) == pytest.approx(wanted, rel=2e-3)


def test_normalised_tiles_are_scale_equivariant(stream):
    encoder = encode.kvarn(2, 2, tile=32, meta_dtype="bfloat16", normalize_tile=True)
    x = stream[0][:, :32].swapaxes(1, 2)
    _, plain, decoded = encode_and_decode(encoder, x, "key")
    for power in (-40, -10, 0, 20, 90):  # powers of two scale floats exactly
        _, scaled_plain, scaled = encode_and_decode(encoder, x * 2.0**power, "key")
        np.testing.assert_array_equal(scaled_plain["codes"], plain["codes"])
        np.testing.assert_allclose(scaled, decoded * 2.0**power, rtol=1e-6)


def test_the_best_round_is_kept_for_each_tile_apart():
    """One round more must never worsen a tile, whatever the other tiles of the batch do."""
    rng = np.random.default_rng(3)
    tiles = rng.normal(size=(6, 16, 32)) * np.exp(2 * rng.normal(size=(6, 16, 1)))
    tiles[1, :, 3] = 0.0  # a zero column: every round divides by noise
    tiles[4] = rng.normal(size=(16, 32)) * 1e-3
    tiles = tiles.astype(np.float32)

    def imbalance(iterations):
        rows, columns = (np.asarray(s) for s in balanced(tiles, iterations))
        std = [(tiles / rows / columns).std(axis=axis, ddof=1) for axis in (-1, -2)]
        return sum(s.max(-1) / np.maximum(s.min(-1), 1e-8) for s in std)

    by_rounds = np.stack([imbalance(iterations) for iterations in range(4)])
    assert (np.diff(by_rounds, axis=0) <= 1e-5 * by_rounds[:-1]).all()
    assert by_rounds[-1, 0] < 0.5 * by_rounds[0, 0]
    together = balanced(tiles, 3)
    for n in (0, 1, 4):  # a tile alone in a batch of itself
        alone = balanced(np.stack([tiles[n]] * 6), 3)
        for got, wanted in zip(together, alone, strict=True):
            np.testing.assert_allclose(got[n], wanted[0], rtol=1e-5)


def test_scales_keep_their_floor():
    """Reference behaviour: a tile much smaller than 1 has every scale at exp(-0.3)."""
    tiles = np.random.default_rng(0).normal(size=(2, 16, 32)).astype(np.float32) * 1e-2
    for scale in balanced(tiles, 8):
        np.testing.assert_allclose(scale, np.exp(-0.3), rtol=1e-6)


def test_rotation_is_part_of_encoding(stream):
    x = stream[0][:, :32].swapaxes(1, 2)
    encoder = encode.kvarn(4, 4, tile=32)
    _, _, decoded = encode_and_decode(encoder, x, "key")
    rotated = encoder.rotate(x, "key")
    assert np.linalg.norm(decoded - rotated) < 0.15 * np.linalg.norm(rotated)
    restored = encoder.unrotate(decoded, "key")
    assert np.linalg.norm(restored - x) < 0.15 * np.linalg.norm(x)
    plain = encode.kvarn(4, 4, tile=32, rotate=False)
    np.testing.assert_array_equal(plain.rotate(x, "key"), x)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_the_other_widths(bits, stream):
    encoder = encode.kvarn(bits, bits, tile=32)
    worst = {1: 2.0, 3: 0.3, 8: 0.02}[bits]
    x = stream[1][:, :32].swapaxes(1, 2)
    _, plain, decoded = encode_and_decode(encoder, x, "value")
    assert int(plain["codes"].min()) == 0 and int(plain["codes"].max()) == 2**bits - 1
    error = np.linalg.norm(encoder.unrotate(decoded, "value") - x) / np.linalg.norm(x)
    assert worst / 20 < error < worst


@pytest.mark.parametrize(("normalize_tile", "role"), [(False, "key"), (True, "value")])
def test_outliers_of_any_size_leave_finite_values(normalize_tile, role, stream):
    encoder = encode.kvarn(2, 2, tile=32, normalize_tile=normalize_tile)
    x = np.array(stream[0][:, :32].swapaxes(1, 2))
    token, channel = x.copy(), x.copy()
    token[0, 0, 3], channel[..., 5] = 1e30, -1e6
    for tile in (token, channel, x * 1e30, x * 0, x * 1e-30):
        assert np.isfinite(encode_and_decode(encoder, tile, role)[2]).all()


def test_bits_per_element_at_two_bits():
    encoder = encode.kvarn(2, 2)
    assert encoder.bits_per_element("key", 128) == encoder.bits_per_element("value", 128) == 2.375
    assert encoder.bits_per_element("key", 64) == 2 + 16 * (2 / 128 + 1 / 64)
    assert encoder.bits_per_element("value", 64) == 2 + 16 * (1 / 128 + 2 / 64)
    k4v2 = encode.kvarn(4, 2)
    assert k4v2.tile_bytes("key", 128) + k4v2.tile_bytes("value", 128) == 13824
    tile = jax.eval_shape(lambda x: encoder.encode_tile(x, "key"), jnp.ones((1, 1, 128, 128)))
    assert {n: leaf.shape[2:] for n, leaf in tile.items()} == {
        "codes": (8, 128),
        "affine": (128,),
        "column": (64,),
    }


@pytest.mark.parametrize("bits", [0, 5, 6, 7, 16])
def test_other_widths_raise_naming_the_field(bits):
    with pytest.raises(ValueError, match=f"key_bits={bits} is not supported: choose one of"):
        encode.kvarn(key_bits=bits)
    with pytest.raises(ValueError, match=f"value_bits={bits} is not supported"):
        encode.kvarn(value_bits=bits)


def test_what_cannot_be_encoded_raises_with_a_remedy():
    with pytest.raises(ValueError, match="head_dim=80 is no power of two.*rtn or int8"):
        encode.kvarn().validate(80)
    with pytest.raises(ValueError, match="head_dim=80 is no power of two"):
        encode.kvarn(tile=32).encode(jnp.zeros((1, 32, 1, 80)), jnp.zeros((1, 32, 1, 80)))
    encode.kvarn(rotate=False).validate(80)
    with pytest.raises(ValueError, match="head_dim=65 is odd"):
        encode.kvarn(rotate=False).validate(65)
    with pytest.raises(ValueError, match="iterations=-1 must be 0 or more"):
        encode.kvarn(iterations=-1)
    with pytest.raises(ValueError, match="meta_dtype='int8' is not supported"):
        encode.kvarn(meta_dtype="int8")
