"""The two stacks to start from: a decoder made here or loaded, and its encoder."""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

import kvjax
from experiments.lclm import training, words
from experiments.lclm.examples import Maker
from kvjax.io.tokenizer import Tokenizer
from kvjax.models.config import DecoderConfig, LayerConfig, tensor_shapes
from kvjax.models.decoder import Decoder
from kvjax.soft import LCLM, SoftConfig, add_memory_rows, load_encoder, new_model
from kvjax.soft.encoder import first_layers
from kvjax.train import put_together, take_apart


class Start(NamedTuple):
    """What an arm begins with."""

    model: LCLM
    words: Tokenizer
    corpus: words.Corpus


def start(config: ConfigDict, shared: Path) -> Start:
    """The model before its first stage, the same for every arm but for its ratios."""
    sides = words.texts(config)
    if config.model.name:
        base, spoken = kvjax.load(config.model.name)
        if spoken is None or not spoken.eos_ids:
            raise ValueError(f"config.model.name={config.model.name!r}: its tokenizer and its end "
                             "of text are needed")  # fmt: skip
        pieces = words.corpus(config, sides, spoken)
    else:
        folder = shared / f"decoder-{_key(config)}"
        spoken = words.vocabulary(sides[0], config.model.tiny.vocabulary, folder / "words.json")
        pieces = words.corpus(config, sides, spoken)
        base = _pretrained(config, folder, spoken, pieces)
    decoder, markers = add_memory_rows(base, config.seed)
    if config.model.encoder:
        encoder, _ = load_encoder(config.model.encoder)
    else:
        encoder = first_layers(base, config.model.encoder_layers)
    settings = soft_config(config, markers)
    return Start(new_model(encoder, decoder, settings, config.seed), spoken, pieces)


def soft_config(config: ConfigDict, markers: tuple[int, int, int]) -> SoftConfig:
    m = config.model
    return SoftConfig(*markers, ratios=tuple(config.ratios), window=m.window, overlap=m.overlap,
                      pooling=m.pooling, causal=m.causal, adapter=m.adapter)  # fmt: skip


def _key(config: ConfigDict) -> str:
    """Changes with whatever the pre-trained decoder depends on."""
    data = json.loads(config.to_json_best_effort())
    parts = [data["model"]["tiny"], data["data"], data["shape"], data["stages"]["pretrain"],
             data["dtype"], data["seed"], data["model"]["window"]]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def tiny_config(tiny: ConfigDict, vocabulary: int, context: int) -> DecoderConfig:
    """Qwen2's kind; with `tiny.window` every other layer, from the first on, sees so few tokens:
    what was just said is then at hand, and copying is learnt within some hundred steps."""
    near = LayerConfig(window=tiny.get("window", 0) or None)
    layers = tuple(LayerConfig() if i % 2 else near for i in range(tiny.layers))
    return DecoderConfig(
        family="qwen2", vocab_size=vocabulary, hidden_size=tiny.hidden,
        intermediate_size=tiny.mlp, num_heads=tiny.heads, num_kv_heads=tiny.kv_heads,
        head_dim=tiny.head_dim, layers=layers, context=context, qkv_bias=True,
        tie_embeddings=True,
    )  # fmt: skip


def fresh(config: DecoderConfig, seed: int, dtype: str = "float32") -> Decoder:
    """A decoder of random weights: normal with a variance of 1 / inputs, norms 1, biases 0."""
    draw, tensors = np.random.default_rng(seed), {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) > 1:
            tensors[name] = draw.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        else:
            tensors[name] = np.full(shape, float(not name.endswith("bias")), np.float32)
    return Decoder(config, tensors, dtype)


def _pretrained(
    config: ConfigDict, folder: Path, spoken: Tokenizer, pieces: words.Corpus
) -> Decoder:
    """The decoder in `folder`, trained there first if need be; arms that wait share it."""
    done = folder / "decoder"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            own = tiny_config(config.model.tiny, spoken.vocab_size, config.model.tiny.context)
            frame, params = take_apart(fresh(own, config.seed), config.dtype)
            size = spoken.vocab_size
            maker = Maker(config.data, spoken, soft_config(config, (size, size + 1, size + 2)))
            fitted = training.pretrain(config, frame, params, maker, pieces.train, folder)
            kvjax.save(put_together(frame, fitted.params), done, spoken)
    return kvjax.load(done)[0]
