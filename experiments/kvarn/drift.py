"""One row in the decoding regime: every position of long texts against the exact cache's."""

from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.head_to_head import evaluate
from experiments.head_to_head.session import Session, open_session
from experiments.kvarn.rows import TEXT_FIELDS, encoder_of, transform_of
from experiments.points import shared_folder
from experiments.record import Metrics
from experiments.statistics import by_block
from experiments.transforms import entry_dtype


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Quality, bits and bytes of the row, and block means of every score."""
    session = session_of(config, folder)
    reader = evaluate.Plain(session, transform_of(config), entry_dtype(config.cache))
    with Metrics(folder) as metrics:
        scores = evaluate.score(session, reader, metrics, folder.name)
    return {
        "scale": evaluate.scale(config, session),
        "quality": evaluate.quality(scores, config),
        "size": evaluate.size(session, reader.cache),
        "bits": bits(session.model, config),
        "blocks": block_means(scores, config.block),
    }


def session_of(config: ConfigDict, folder: Path) -> Session:
    """Model, texts and exact reference: the same for all rows of a workdir."""
    kept = {field: config[field] for field in TEXT_FIELDS if field != "part"}
    return open_session(
        ConfigDict(kept | {"decode_tokens": 0, "cache": config.cache}), shared_folder(folder)
    )


def bits(model: Any, config: ConfigDict) -> dict[str, float] | None:
    """The encoder's own bits per element with all metadata; None where tokens are exact."""
    encoder = encoder_of(config)
    if encoder is None or "exact_tokens" in config:
        return None
    dim = model.config.head_dim
    key, value = (encoder.bits_per_element(role, dim) for role in ("key", "value"))
    return {"key": key, "value": value, "mean": (key + value) / 2}


def block_means(scores: dict[str, np.ndarray], block: int) -> dict[str, list[list[float]]]:
    """{score: [texts][blocks]}, from which tables and pictures are made."""
    return {name: by_block(value, block).tolist() for name, value in scores.items()}
