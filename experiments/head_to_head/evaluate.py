"""One row: run the texts through the cache, compare every position with the exact cache's."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from tqdm import tqdm

import kvjax
from experiments.head_to_head.session import Session, open_session
from experiments.head_to_head.soft import SoftTokens
from experiments.head_to_head.speed import decode_rates
from experiments.points import shared_folder
from experiments.record import Metrics
from experiments.statistics import by_block, by_quarter, mean_interval
from experiments.transforms import build, entry_dtype
from kvjax.models.decoder import step_hidden, unembed


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Quality, bytes and speed of `config.cache` on `config.texts`."""
    session = open_session(config, shared_folder(folder))
    reader = reader_of(session, config)
    with Metrics(folder) as metrics:
        scores = score(session, reader, metrics, folder.name)
        result = {
            "scale": scale(config, session),
            "quality": quality(scores, config),
            "size": size(session, reader.cache),
            "speed": decode_rates(session, reader.model, reader.cache, config.decode_tokens),
        }
        metrics.write(config.length, summary(result))
    return result | {"blocks": {k: by_block(v, config.block).tolist() for k, v in scores.items()}}


@jax.jit
def compare(exact: jax.Array, ours: jax.Array, target: jax.Array) -> dict[str, jax.Array]:
    """Per-position scores [B, T] of logits [B, T, V] against the exact cache's and the text.

    `nll` and `kl` = KL(exact || ours) in nats, `agreement` 1 where both rank the same token first.
    """
    log_p, log_q = jax.nn.log_softmax(exact), jax.nn.log_softmax(ours)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    at_target = partial(jnp.take_along_axis, indices=target[..., None], axis=-1)
    return {
        "nll": -at_target(log_q)[..., 0],
        "exact_nll": -at_target(log_p)[..., 0],
        # Both sum to 1, so q - p adds 0; with it no term is negative and rounding hardly shows.
        "kl": jnp.sum(p * (log_p - log_q) + q - p, axis=-1),
        "agreement": (exact.argmax(-1) == ours.argmax(-1)).astype(jnp.float32),
    }


class Plain:
    """What reads block by block through a cache transform: the model's own tokens all along."""

    def __init__(self, session: Session, transform: Any, dtype: str | None) -> None:
        self.model = session.model
        batch, room = len(session.tokens), session.capacity
        self.cache = kvjax.init_cache(self.model, transform, batch, room, dtype=dtype)

    def hidden_of(self, tokens: jax.Array) -> jax.Array:
        """tokens [B,T] -> hidden states [B,T,E]; the cache holds them afterwards."""
        hidden, self.cache = step_hidden(self.model, tokens, self.cache, donate=True)
        self.cache = kvjax.finish(self.model, self.cache)
        return hidden


def reader_of(session: Session, config: ConfigDict) -> Plain | SoftTokens:
    """What a point's config reads by; `ValueError` for what this model cannot have."""
    transform = build(config.cache)
    if "soft" in config:
        return SoftTokens(session, config.compressor, config.soft, transform)
    return Plain(session, transform, entry_dtype(config.cache))


def score(
    session: Session, reader: Plain | SoftTokens, metrics: Metrics, name: str
) -> dict[str, np.ndarray]:
    """Scores [B, T] of every position; the reader's cache holds the whole text afterwards."""
    reference = session.reference
    parts: list[dict[str, np.ndarray]] = []
    blocks, words = list(session.blocks()), session.model.config.vocab_size
    for start, tokens in tqdm(blocks, desc=name, unit="block", leave=False, disable=None):
        stop = start + session.block
        hidden = reader.hidden_of(tokens)
        exact = unembed(session.model, jnp.asarray(reference[:, start:stop]).astype(hidden.dtype))
        target = session.tokens[:, start + 1 : stop + 1]
        ours = unembed(reader.model, hidden)[..., :words]  # a compressor's markers are no text
        parts.append(jax.device_get(compare(exact, ours, target)))
        metrics.write(stop, {key: float(value.mean()) for key, value in parts[-1].items()})
    scores = {key: np.concatenate([part[key] for part in parts], axis=1) for key in parts[0]}
    return {key: value.astype(np.float64) for key, value in scores.items()}


def scale(config: ConfigDict, session: Session) -> dict[str, Any]:
    """What the numbers are about: it stands in the header of every table."""
    return {
        "model": config.model,
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(session.model, nnx.Param))),
        "dtype": config.dtype,
        "texts": list(config.texts),
        "tokens_sha256": session.hash,
        "length": config.length,
        "block": config.block,
        "positions": len(config.texts) * config.length,
        "regime": "decoding",
    }


def quality(scores: dict[str, np.ndarray], config: ConfigDict) -> dict[str, Any]:
    """Means over all positions, 95 % intervals over texts, and the course by quarter."""
    blocks = {key: by_block(value, config.block) for key, value in scores.items()}
    increase = mean_interval(blocks["nll"] - blocks["exact_nll"])  # paired: same positions
    return {
        "perplexity": float(np.exp(scores["nll"].mean())),
        "exact_perplexity": float(np.exp(scores["exact_nll"].mean())),
        "kl": mean_interval(blocks["kl"])._asdict(),
        "nll_increase": increase._asdict(),
        "agreement": mean_interval(blocks["agreement"])._asdict(),
        "perplexity_by_quarter": [float(np.exp(x)) for x in by_quarter(scores["nll"])],
        "kl_by_quarter": by_quarter(scores["kl"]),
        "by_text": [
            {
                "text": name,
                "perplexity": float(np.exp(scores["nll"][row].mean())),
                "exact_perplexity": float(np.exp(scores["exact_nll"][row].mean())),
                "kl": float(scores["kl"][row].mean()),
                "agreement": float(scores["agreement"][row].mean()),
            }
            for row, name in enumerate(config.texts)
        ],
    }


def size(session: Session, cache: Any) -> dict[str, Any]:
    """Measured bytes of the live cache, against an exact cache's of the same capacity."""
    batch, capacity = len(session.tokens), session.capacity
    ours = kvjax.nbytes(cache)
    exact = kvjax.footprint(session.model.cache_spec(), kvjax.cache(), batch, capacity)
    config = session.model.config
    elements = batch * capacity * len(config.layers) * 2 * config.num_kv_heads * config.head_dim
    return {
        "bytes": ours.total,
        "device": ours.device,
        "host": ours.host,
        "resident": ours.resident,
        "exact_bytes": exact.total,
        "ratio": exact.total / ours.total,
        "bits_per_element": 8 * ours.total / elements,
        "capacity": capacity,
        "batch": batch,
    }


def summary(result: dict[str, Any]) -> dict[str, float]:
    """The scalars of the whole row, for the last line of the metrics."""
    return {
        "perplexity": result["quality"]["perplexity"],
        "kl_mean": result["quality"]["kl"]["mean"],
        "bytes": result["size"]["bytes"],
        "tokens_per_second": result["speed"]["tokens_per_second"],
    }
