"""The trained soft-token compressor in `config.compressor`, for studies that take one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvjax.models.config import DecoderConfig

if TYPE_CHECKING:
    from kvjax.soft import LCLM

MARKERS = 3  # rows that a compressor's decoder adds to its model's vocabulary


def check_compressor(folder: str, asked: Mapping[str, int]) -> None:
    """`ValueError` unless `folder` holds a compressor that serves every ratio of `asked`, which
    are there by the field of the config that asks."""
    if not asked:
        return
    from kvjax.soft import load_settings  # JAX: not for a table made elsewhere

    try:
        ratios = load_settings(folder).ratios
    except ValueError as error:
        raise ValueError(f"config.compressor={folder!r}: holds no compressor ({error}); train one "
                         "by configs/lclm.py:smollm2 and name its WORKDIR/points/mixed/model"
                         ) from error  # fmt: skip
    for field, ratio in asked.items():
        if ratio not in ratios:
            raise ValueError(f"{field}={ratio}: {folder} compresses by "
                             f"{', '.join(map(str, ratios))}; use that, or train another "
                             "config.compressor")  # fmt: skip


def open_compressor(folder: str, model: DecoderConfig, dtype: str) -> LCLM:
    """The `kvjax.soft.LCLM` in `folder`; `ValueError` where it was not made of `model`."""
    from kvjax.soft import load

    soft = load(folder, dtype).model
    found, wanted = (
        (c.vocab_size, c.hidden_size, len(c.layers)) for c in (soft.decoder.config, model)
    )
    if found != (wanted[0] + MARKERS, *wanted[1:]):
        raise ValueError(f"config.compressor={folder!r}: its decoder's vocabulary, width and "
                         f"depth are {found}, the model's {wanted}; give one that was made of "
                         "config.model")  # fmt: skip
    return soft
