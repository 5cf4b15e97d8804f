import functools

import pytest

from kvjax.io.hf import load_config
from kvjax.models.decoder import Decoder
from tests.golden.hf import reference


@functools.cache
def golden(name: str, config: str = "config.json"):
    """(model, what transformers computes for it) of one golden folder."""
    from safetensors.numpy import load_file

    folder = reference.FOLDER / name
    return (
        Decoder(load_config(folder / config), load_file(folder / "model.safetensors")),
        reference.expected(name),
    )


@pytest.fixture(params=reference.NAMES)
def family(request):
    return golden(request.param)


@pytest.fixture
def llama():
    return golden("llama")
