"""What breaks naive quantizers, for every encoder: the right value, or one clear line before any
compilation."""

import inspect

import jax
import numpy as np
import pytest

import kvjax
from kvjax import encode
from tests.cache import feed as f
from tests.encode.contract import ROLES, relative, run

TILE, DIM = 32, 64
NAMES = [name for name in encode.ENCODERS if name != "none"]
every_name = pytest.mark.parametrize("name", NAMES)
HADAMARD = {"hadamard_rtn", "turboquant_nc", "oscar", "kvarn", "heed"}
# A codebook has no entry for "all of the norm in one channel", which is what a Hadamard rotation
# makes of a constant token, nor for any given number.
CODEBOOK_ERROR = {("turboquant", "key"): 0.2, ("turboquant", "value"): 0.2,
                  ("turboquant_nc", "key"): 0.4}  # fmt: skip


def arguments(name):
    return inspect.signature(encode.ENCODERS[name]).parameters


def make(name, **kwargs):
    group = {"group": 16} if "group" in arguments(name) else {}
    return encode.from_config(name, **({"tile": TILE} | group | kwargs))


def edges():
    """Tiles [E, 1, C, D] by name, one of each kind."""
    plain = np.random.default_rng(0).normal(size=(TILE, DIM)).astype(np.float32)
    tiles = {name: plain.copy() for name in ("plain", "constant channel", "zero token")}
    tiles["constant channel"][:, 9] = 1.5
    tiles["zero token"][7] = 0.0
    tiles["constant token"] = plain.copy()
    tiles["constant token"][5] = -2.5
    tiles |= {"zeros": np.zeros_like(plain), "constant": np.full_like(plain, -1.5)}
    return tiles | {"huge": plain * np.float32(1e5), "1e5": np.sign(plain) * np.float32(1e5)}


def round_trips(name, role, **kwargs):
    """(tile, what it decodes to) by name of `edges`."""
    tiles = edges()
    decoded = np.asarray(
        run(make(name, **kwargs), np.stack(list(tiles.values()))[:, None], role)[2]
    )
    return {key: (x, y[0]) for (key, x), y in zip(tiles.items(), decoded, strict=True)}


@every_name
@pytest.mark.parametrize("role", ROLES)
def test_edges_decode_to_the_right_values(name, role):
    found = round_trips(name, role)
    assert all(np.isfinite(y).all() for _, y in found.values())
    usual, constant = relative(*found["plain"][::-1]), CODEBOOK_ERROR.get((name, role), 0.01)
    assert 1e-4 < usual < 0.6
    assert not found["zeros"][1].any()
    assert relative(*found["constant"][::-1]) < constant
    for key in ("zero token", "constant token", "constant channel"):
        assert relative(*found[key][::-1]) < 1.3 * usual + 0.05, key
    if role == "value":
        assert np.abs(found["zero token"][1][7]).max() == 0
        x, y = found["constant token"]
        assert relative(y[5], x[5]) < constant


@every_name
@pytest.mark.parametrize("role", ROLES)
def test_numbers_beyond_float16_saturate(name, role):
    """They come back smaller, in their own direction, and not as something else."""
    found = round_trips(name, role)
    for key in ("huge", "1e5"):
        x, y = (part.ravel().astype(np.float64) for part in found[key])
        assert relative(y, x) < 0.95, key
        assert x @ y / np.linalg.norm(x) / np.linalg.norm(y) > 0.75, key


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if "meta_dtype" in arguments(n)])
def test_bfloat16_scales_hold_what_float16_cannot(name):
    found = round_trips(name, "value", meta_dtype="bfloat16")
    usual = relative(*found["plain"][::-1])
    assert relative(*found["huge"][::-1]) < 1.1 * usual
    assert relative(*found["1e5"][::-1]) < 1.3 * usual


@every_name
def test_no_tokens_give_no_tiles(name):
    empty = np.zeros((1, 0, 2, DIM), np.float32)
    encoder = make(name)
    tiles = encoder.encode(empty, empty)
    assert tiles.nbytes == 0 and encoder.decode(tiles)[1].shape == empty.shape


@every_name
def test_a_capacity_below_one_tile_holds_exact_tokens_only(name):
    layer = f.empty(kvjax.cache(encode=make(name)), f.layer_spec(dim=DIM), 1, TILE - 1).layers[0]
    assert not layer.body and layer.recent["v"].shape[2] == TILE - 1


# Every encoder's own refusals: arguments, head dim, and the line that says what to do.
OTHER = r"choose one of \("
REFUSED = (
    [(n, {f"{r}_bits": b}, DIM, rf"{r}_bits={b} .*{OTHER}|{r}_bits={b} leaves")
     for n in NAMES if "key_bits" in arguments(n) for r in ROLES for b in (0, 5, 16)]
    + [(n, {"tile": t}, DIM, f"tile={t} must be an even number.*such as 64")
       for n in NAMES for t in (0, 1, 33)]
    + [(n, {"meta_dtype": "float32"}, DIM, f"meta_dtype='float32' .*{OTHER}")
       for n in NAMES if "meta_dtype" in arguments(n)]
    + [(n, {}, 80, "head_dim=80 is no power of two.*use rtn or int8") for n in sorted(HADAMARD)]
    + [(n, {"group": 32}, 40, "head_dim=40 is not a multiple of group=32.*choose a group")
       for n in ("kivi", "oscar")]
    + [(n, {"group": 32, "tile": 48}, DIM, "tile=48 is not a multiple of group=32.*such as 128")
       for n in ("kivi", "oscar")]
    + [("kvarn", {"rotate": False}, 33, "head_dim=33 is odd.*use rtn or int8"),
       ("kvarn", {"scale_bits": 4}, DIM, "scale_bits=4 .*choose 8 or 16"),
       ("kvarn", {"clip": 0.5}, DIM, "clip=0.5 must be"),
       ("kitty", {"key_bits": 3}, DIM, "key_bits=3 .*boosted channels have twice as many.*choose"),
       ("kitty", {"share": 1.0}, DIM, "share=1.0 must be between 0 and 1"),
       ("kitty", {}, 4, "share=0.125 of head_dim=4 is not one channel: choose a larger share"),
       ("fp8", {"format": "e3m4"}, DIM, "format='e3m4' is unknown: choose one of"),
       ("turboquant", {"outliers": 63}, DIM, "outliers=63 must leave.*choose fewer"),
       ("turboquant", {}, 1, "head_dim=1 has nothing to rotate: use int8")]
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kwargs", "dim", "line"), REFUSED, ids=[f"{n} {k} {d}" for n, k, d, _ in REFUSED]
)
def test_what_an_encoder_cannot_do_is_refused_before_any_compilation(
    name, kwargs, dim, line, caplog
):
    with jax.log_compiles(), pytest.raises(ValueError, match=line):
        transform = kvjax.cache(encode=make(name, **kwargs), sink=4)
        f.empty(transform, f.layer_spec(dim=dim), 1, 256)
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


def test_compilations_would_have_been_seen(caplog):
    with jax.log_compiles():
        f.empty(kvjax.cache(encode=make("int8")), f.layer_spec(dim=DIM), 1, 251)
        jax.jit(lambda x: x * 3 + 1)(np.ones(3))
    assert [r for r in caplog.records if "Compiling" in r.getMessage()]


@every_name
def test_texts_that_the_tile_does_not_divide_are_refused(name):
    x = np.zeros((1, TILE + 8, 1, DIM), np.float32)
    with pytest.raises(ValueError, match="length 40 is not a multiple of tile=32: keep the rest"):
        make(name).encode(x, x)
    with pytest.raises(ValueError, match="cache.tile is 64 but cache.encode.tile is 32"):
        kvjax.cache(encode=make(name), tile=64)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in HADAMARD])
def test_other_head_dims_are_encoded_as_well(name):
    """80 fills no whole number of words at 2 bits and is no power of two."""
    x = np.random.default_rng(1).normal(size=(1, TILE, 80)).astype(np.float32)
    tile, _, decoded = run(make(name), x, "key")
    assert sum(leaf.nbytes for leaf in tile.values()) == make(name).tile_bytes("key", 80)
    assert relative(decoded, x) < 0.6


@pytest.mark.slow
@every_name
def test_attention_over_edges_stays_finite(name):
    """Zero, constant and huge tokens in one tile, read through the cache."""
    spec = f.layer_spec()
    q, k, v = f.draw(0, 1, TILE + 3, spec)
    k[:, 4], k[:, 5], k[:, :, :, 3] = 0.0, 1.5, 60.0
    v[:, 6], v[:, 7], v[:, :, :, 2], v[:, 8, 0, 0] = 0.0, -2.0, 0.0, 1e5
    transform = kvjax.cache(encode=make(name), sink=2)
    layer = f.empty(transform, spec, 1, TILE + 3).layers[0]
    out, _ = f.feed(transform, layer, q, k, v, [TILE + 2, 1])
    assert np.isfinite(out).all()
    assert np.abs(out[:, -1, 2:]).max() <= 3 * np.abs(v[:, :, 1:]).max()  # heads 2 … see no 1e5
