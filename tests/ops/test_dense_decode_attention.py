"""dense_decode_attention: the TPU kernel against the reference, in Pallas's interpreters."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import kvjax
from kvjax.ops.dense_decode_attention import tpu
from kvjax.ops.dense_decode_attention.api import dense_decode_attention
from kvjax.ops.dense_decode_attention.blocks import Tpu, tpu_blocks
from kvjax.ops.partials import Scoring
from tests.cache import feed

STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
# B, K, G, S, Dk, Dv, T, rows of the bias, entries a step, dtype
CASES = [
    (3, 2, 4, 300, 128, 128, 1, 0, 128, "float32"),
    (3, 3, 3, 130, 64, 32, 3, 3, 130, "bfloat16"),
    (2, 1, 8, 256, 128, 128, 2, 1, 128, "bfloat16"),
]


def arguments(case):
    """Entries beyond a row's length are NaN; the second row has none at all."""
    b, k, g, s, dim, width, t, rows, _, dtype = case
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(b, t, k * g, dim)), jnp.float32)
    key = jnp.asarray(rng.normal(size=(b, k, s, dim)), dtype)
    value = jnp.asarray(rng.normal(size=(b, k, s, width)), dtype)
    length = jnp.asarray([s, 0, s // 2 + 1][:b], jnp.int32)
    beyond = (jnp.arange(s) >= length[:, None])[:, None, :, None]
    bias = jnp.asarray(rng.normal(size=(b, rows, s)), jnp.float32) if rows else None
    if bias is not None:
        bias = bias.at[..., ::3].set(-jnp.inf)
    return query, jnp.where(beyond, jnp.nan, key), jnp.where(beyond, jnp.nan, value), length, bias


def same(case, interpret):
    *inputs, bias = arguments(case)
    scoring = Scoring(case[4] ** -0.5, 5.0)
    want = dense_decode_attention(*inputs, scoring=scoring, bias=bias, implementation="reference")
    got = tpu.attention(*inputs, bias, scoring=scoring, blocks=Tpu(case[-2]), interpret=interpret)
    tolerance = 1e-5 if case[-1] == "float32" else 1e-2
    seen = np.isfinite(want.lse)
    np.testing.assert_array_equal(np.isfinite(got.lse), seen)
    np.testing.assert_allclose(got.lse[seen], want.lse[seen], atol=tolerance)
    np.testing.assert_allclose(got.out, want.out, atol=tolerance)
    assert not np.asarray(got.out)[1].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_the_reference(case):
    same(case, True)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_no_races_and_nothing_unwritten_is_read(case):
    same(case, STRICT)


def test_what_the_kernel_refuses():
    *inputs, _ = arguments(CASES[0])
    wide = jnp.zeros((3, 9, 8, 128))
    with pytest.raises(ValueError, match="9 new tokens"):
        dense_decode_attention(
            wide, *inputs[1:], scoring=Scoring(1.0), implementation="tpu"
        )
    mixed = (inputs[0], inputs[1].astype(jnp.bfloat16), *inputs[2:])
    with pytest.raises(ValueError, match="keys of bfloat16 and values of float32"):
        dense_decode_attention(*mixed, scoring=Scoring(1.0), implementation="tpu")


def test_blocks():
    assert tpu_blocks(130, 4096) == Tpu(130)
    assert tpu_blocks(8192, 4096) == Tpu(1024)
    with pytest.raises(ValueError, match="entries=100 must be all 300"):
        Tpu(100).check(300)


def test_a_decoding_step_reads_exact_segments_by_the_op(monkeypatch):
    """As on an accelerator: sinks, rings over their window and recent tiles, at every fill."""
    attend = sys.modules["kvjax.cache.attend"]  # the package's own name for it is the function's
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments[1].shape)
        return dense_decode_attention(*arguments, **options)

    monkeypatch.setattr(attend, "_has_kernels", lambda: True)
    monkeypatch.setattr(attend, "dense_decode_attention", counted)
    for transform, near, sink in (
        (kvjax.cache(sink=5), None, 0),
        (kvjax.cache(select=kvjax.select.streaming(2, 4)), 4, 2),
    ):
        spec = feed.layer_spec()
        q, k, v = feed.draw(0, 2, 9, spec)
        layer = feed.empty(transform, spec, 2, 24).layers[0]
        out, _ = feed.feed(transform, layer, q, k, v, [7, 1, 1])
        want = feed.plain(q, k, v, spec, feed.causal(9, near, sink))
        np.testing.assert_allclose(out, want, rtol=2e-4, atol=2e-5)
    assert calls
