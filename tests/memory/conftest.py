import functools
import json

import jax.numpy as jnp
import numpy as np

from kvjax.memory import DeltaMemConfig, attach
from kvjax.models.config import DecoderConfig, LayerConfig, RopeConfig
from kvjax.models.decoder import Decoder
from tests.golden.delta_mem.reference import arrays

CONFIG = DecoderConfig(
    family="qwen3", vocab_size=256, hidden_size=64, intermediate_size=128, num_heads=4,
    num_kv_heads=2, head_dim=16, layers=(LayerConfig(rope=RopeConfig(theta=5e6)),) * 2,
    context=4096, qk_norm=True,
)  # fmt: skip
COLUMNS = slice(None, None, 32)  # of the vocabulary, kept in the reference data
BASE = arrays("base")
INPUT = {k.removeprefix("in."): jnp.asarray(v, jnp.int32) for k, v in BASE.items() if "in." in k}
WRITE_MASK = INPUT["write_attention_mask"].astype(bool)
READ_MASK = INPUT["read_attention_mask"].astype(bool)


@functools.cache
def base() -> Decoder:
    return Decoder(CONFIG, BASE)


def adapter(name: str) -> dict[str, np.ndarray]:
    """The reference's weights under the original's names; `msw` has those of layer 0."""
    prefix = f"{name}."
    return {
        "model.layers.{}.self_attn.{}".format(*key.removeprefix(prefix).split(".", 1)): value
        for key, value in arrays("passes").items()
        if key.startswith((f"{prefix}0.", f"{prefix}1."))
    }


@functools.cache
def with_memory(**config) -> Decoder:
    return attach(base(), DeltaMemConfig(**config), adapter("tsw"))


def relative(got, wanted) -> float:
    wanted = np.asarray(wanted)
    return float(np.abs(np.asarray(got) - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def as_json(path):
    return json.loads(path.read_text())
