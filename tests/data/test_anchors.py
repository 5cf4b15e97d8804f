"""The real model on real text: perplexities known from an independent program (llama.cpp)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.data import load_text
from kvjax.models.decoder import step_hidden, unembed

ANCHORS = {
    "wikipedia/Albedo": 14.4,
    "austen/persuasion": 33.1,  # llama.cpp: 33.4
    "python-docs/multiprocessing": 9.9,
}


def perplexity(model, ids: list[int], block: int = 256) -> float:
    """exp of the mean negative log-likelihood of ids[1:], through the exact cache."""
    tokens, nll = jnp.asarray([ids], jnp.int32), []
    cache = kvjax.init_cache(model, kvjax.cache(), batch=1, capacity=len(ids))
    for start in range(0, len(ids), block):
        hidden, cache = step_hidden(model, tokens[:, start : start + block], cache, donate=True)
        target = tokens[0, start + 1 : start + 1 + block]
        log_p = jax.nn.log_softmax(unembed(model, hidden)[0, : len(target)])
        nll.append(-np.asarray(jnp.take_along_axis(log_p, target[:, None], axis=1)))
    return float(np.exp(np.concatenate(nll).mean()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ANCHORS)
def test_perplexity_of_the_first_2048_tokens(name):
    try:
        text = load_text(name).text
        model, tokenizer = kvjax.load("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
    found = perplexity(model, tokenizer.encode(text)[:2048])
    assert found == pytest.approx(ANCHORS[name], rel=0.01)
