"""Soft tokens in place of a history: a trained compressor, a memory beside its decoder."""

from __future__ import annotations

from collections.abc import Sequence

from jax import Array
from ml_collections import ConfigDict

from experiments.compressor import open_compressor
from kvjax import memory
from kvjax.models.decoder import Decoder
from kvjax.soft import LCLM, encode_context, prompt

History = tuple[Sequence[int] | Array, Sequence[int]]  # n ids or inputs [n,E]; messages of them


def with_memory_of(model: Decoder, config: ConfigDict) -> LCLM:
    """The compressor in `config.compressor`; the memory beside `model`, if any, beside its decoder.

    `ValueError` where the compressor was not made of `config.model`.
    """
    soft = open_compressor(config.compressor, model.config, config.dtype)
    if not config.arm.adapter:
        return soft
    decoder = memory.attach(soft.decoder, memory.memory_config(model), memory.tensors(model))
    return LCLM(soft.encoder, soft.adapter, decoder, soft.config)


def compressed(
    soft: LCLM, histories: Sequence[tuple[list[int], list[int]]], ratio: int
) -> list[History]:
    """Histories of ids as inputs of the decoder: for each its soft tokens between two markers.

    A soft token stands for `ratio` tokens and is in the message of the first of them; the markers
    are in the first and in the last message.
    """
    context = encode_context(soft, [ids for ids, _ in histories], ratio)
    return [
        (prompt(soft, [tokens])[0], [numbers[0], *numbers[::ratio], numbers[-1]])
        for tokens, (_, numbers) in zip(context.documents, histories, strict=True)
    ]
