"""Every family against what transformers computes, without a cache and through one."""

import numpy as np
import pytest

import kvjax
from kvjax.models.decoder import period
from tests.golden.hf.reference import NAMES
from tests.models.conftest import golden

TOL = {"atol": 2e-4, "rtol": 1e-4}
EXACT = kvjax.cache()


def through_cache(model, tokens, widths, mask=None, transform=EXACT, capacity=48):
    cache = kvjax.init_cache(model, transform, len(tokens), capacity)
    out, at = [], 0
    for width in widths:
        part = slice(at, at + width)
        real = None if mask is None else mask[:, part]
        logits, cache = kvjax.step(model, tokens[:, part], cache, real)
        out.append(logits)
        at += width
    return np.concatenate(out, 1), cache


@pytest.mark.parametrize("config", ["config.json", "config_legacy.json"])
@pytest.mark.parametrize("name", NAMES)
def test_full_forward(name, config):
    model, e = golden(name, config)
    np.testing.assert_allclose(kvjax.forward(model, e["input_ids"]), e["logits_full"], **TOL)


@pytest.mark.parametrize("side", ["leftpad", "rightpad"])
def test_padded_forward(family, side):
    model, e = family
    mask = e[f"{side}.attention_mask"]
    got = kvjax.forward(model, e[f"{side}.input_ids"], mask)
    np.testing.assert_allclose(got, e[f"{side}.logits_full"], **TOL)


def test_prefill_then_single_steps(family):
    model, e = family
    prompt = int(e["prefill_len"][0])
    steps = [prompt] + [1] * (e["input_ids"].shape[1] - prompt)
    got, cache = through_cache(model, e["input_ids"], steps)
    np.testing.assert_allclose(got, e["logits_decode"], **TOL)
    assert cache.length.tolist() == [sum(steps)] * 2


def test_chunked_prefill(family):
    model, e = family
    got, _ = through_cache(model, e["input_ids"], [5] * 8)
    np.testing.assert_allclose(got, e["logits_full"], **TOL)


@pytest.mark.parametrize("side", ["leftpad", "rightpad"])
def test_padded_rows_through_the_cache(family, side):
    model, e = family
    mask = e[f"{side}.attention_mask"]
    got, cache = through_cache(model, e[f"{side}.input_ids"], [5] * 4 + [1] * 20, mask)
    np.testing.assert_allclose(got, e[f"{side}.logits_full"], **TOL)
    assert cache.length.tolist() == mask.sum(1).tolist()


def test_greedy_tokens(family):
    model, e = family
    prompt = e["input_ids"][:, : int(e["prefill_len"][0])]
    out = kvjax.generate(model, prompt, EXACT, max_new_tokens=12, stop=())
    np.testing.assert_array_equal(out, e["greedy.tokens"])


@pytest.mark.parametrize("name", ["llama", "llama_rope_llama3"])
def test_cached_keys_and_values(name):
    model, e = golden(name)
    prompt = int(e["prefill_len"][0])
    _, cache = through_cache(model, e["input_ids"], [prompt])
    for i, layer in enumerate(cache.layers):
        for stream in "kv":
            held = layer.recent[stream][:, :, :prompt]
            np.testing.assert_allclose(held, e[f"{stream}.{i}"], **TOL)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text"])
def test_window_layers_keep_only_their_window(name):
    """Mixed caches: bytes of window layers stop growing, those of the others do not."""
    model, e = golden(name)
    sizes = {}
    for capacity in (64, 256):
        cache = kvjax.init_cache(model, EXACT, 1, capacity)
        sizes[capacity] = [layer.recent["k"].shape[2] for layer in cache.layers]
    for config, small, large in zip(model.config.layers, sizes[64], sizes[256], strict=True):
        expected = (config.window - 1,) * 2 if config.window else (64, 256)
        assert (small, large) == expected
    # A ring of its own in each layer: the held keys are the newest window - 1, in their slots.
    prompt = int(e["prefill_len"][0])
    _, cache = through_cache(model, e["input_ids"], [prompt - 3, 3])
    for i, layer in enumerate(cache.layers):
        if f"k.{i}" in e and layer.layout.ring:
            ring = layer.layout.recent
            newest = e[f"k.{i}"][:, :, prompt - ring :]
            order = np.arange(prompt - ring, prompt) % ring
            np.testing.assert_allclose(layer.recent["k"][:, :, order], newest, **TOL)


def test_ragged_right_padding_then_steps_equals_the_rows_alone(family):
    """Padded prompts followed by decoding, where transformers itself goes wrong for windows."""
    model, e = family
    mask = e["rightpad.attention_mask"].astype(bool)
    mask[:, 30:] = False
    counts = mask.sum(1)
    cache = kvjax.init_cache(model, EXACT, 2, 48)
    _, cache = kvjax.step(model, e["rightpad.input_ids"], cache, mask)
    follow = e["input_ids"][:, 30:34]
    got = []
    for t in range(4):
        logits, cache = kvjax.step(model, follow[:, t : t + 1], cache)
        got.append(logits)
    for b in range(2):
        row = np.concatenate([e["rightpad.input_ids"][b, : counts[b]], follow[b]])[None]
        alone = kvjax.forward(model, row)[:, -4:]
        np.testing.assert_allclose(np.concatenate(got, 1)[b : b + 1], alone, **TOL)


def test_periods():
    assert [period(golden(n)[0].config) for n in ("llama", "gemma2", "gemma3_text")] == [1, 2, 4]


def test_bfloat16_stays_near_float32(llama):
    model, e = llama
    small = kvjax.Decoder(model.config, model.tensors(), dtype="bfloat16")
    got, cache = through_cache(small, e["input_ids"], [24, 16])
    assert got.dtype == np.float32
    assert cache.layers[0].recent["k"].dtype == "bfloat16"
    error = np.abs(got - e["logits_full"])
    assert error.mean() < 0.1 and 0 < error.max() < 1.0


def test_cache_dtype_is_its_own_choice(llama):
    model, e = llama
    cache = kvjax.init_cache(model, EXACT, 2, 48, dtype="bfloat16")
    assert cache.layers[0].recent["v"].dtype == "bfloat16"
    logits, cache = kvjax.step(model, e["input_ids"][:, :30], cache)
    logits, _ = kvjax.step(model, e["input_ids"][:, 30:], cache)
    assert np.abs(np.asarray(logits) - e["logits_full"][:, 30:]).max() < 0.5


def test_tensors_are_those_of_the_file(llama):
    from safetensors.numpy import load_file

    from tests.golden.hf.reference import FOLDER

    model, _ = llama
    stored = load_file(FOLDER / "llama" / "model.safetensors")
    got = model.tensors()
    assert got.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize(
    "tokens,mask,field",
    [
        (np.zeros((2, 0), np.int32), None, "tokens"),
        (np.zeros(3, np.int32), None, "tokens"),
        (np.zeros((1, 3)), None, "dtype"),
        (np.full((1, 3), 256), None, "0 … 255"),
        (np.full((1, 3), -1), None, "0 … 255"),
        (np.zeros((1, 3), np.int32), np.ones((1, 4), bool), "mask"),
        (np.zeros((2, 3), np.int32), None, "rows"),
    ],
)
def test_bad_tokens_are_refused(llama, tokens, mask, field):
    cache = kvjax.init_cache(llama[0], EXACT, 1, 16)
    with pytest.raises(ValueError, match=field):
        kvjax.step(llama[0], tokens, cache, mask)


def test_overflow_raises_and_loses_nothing(llama):
    model, e = llama
    cache = kvjax.init_cache(model, EXACT, 2, 20)
    _, cache = kvjax.step(model, e["input_ids"][:, :18], cache)
    with pytest.raises(ValueError, match="capacity"):
        kvjax.step(model, e["input_ids"][:, 18:21], cache)
    logits, _ = kvjax.step(model, e["input_ids"][:, 18:20], cache)
    np.testing.assert_allclose(logits, e["logits_full"][:, 18:20], **TOL)
