"""A tiny model folder and a config on it, so that the real loop runs in seconds."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from experiments.args import config_module
from kvjax.io.hf import save_folder
from kvjax.io.tokenizer import Tokenizer
from kvjax.models.config import config_from_hf, tensor_shapes

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "head_to_head.py")


def byte_tokenizer() -> Tokenizer:
    """One id a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Llama of 2 layers and head_dim 32 with random weights that do attend."""
    config = config_from_hf(
        dict(model_type="llama", vocab_size=256, hidden_size=64, intermediate_size=96,
             num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
             max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=True)
    )  # fmt: skip
    random = np.random.default_rng(0)
    tensors = {
        name: np.ones(shape, np.float32)
        if "norm" in name
        else random.normal(size=shape, scale=0.3).astype(np.float32)
        for name, shape in tensor_shapes(config).items()
    }
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_folder(folder, config, tensors, byte_tokenizer())
    return folder


@pytest.fixture
def tiny_overrides(tiny_model) -> dict:
    """What makes the smoke config a matter of seconds, by dotted path."""
    return {
        "model": str(tiny_model),
        "texts": ("python-source/argparse", "python-topics/types"),
        "length": 128,
        "block": 32,
        "decode_tokens": 4,
        "cache.sink": 16,
        "cache.tile": 32,
        "rows": ("exact", "kvarn-k2v2"),
    }


@pytest.fixture
def tiny_config(tiny_overrides):
    from experiments.args import with_overrides

    module, arg = config_module(CONFIG + ":smoke")
    return with_overrides(module.get_config(arg), tiny_overrides)
