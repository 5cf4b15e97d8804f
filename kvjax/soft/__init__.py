"""Soft tokens: an encoder compresses text before the decoder sees it (LCLM, arXiv 2606.09659)."""

from kvjax.soft.config import SoftConfig
from kvjax.soft.context import Context, encode_context, prompt
from kvjax.soft.files import load, load_encoder, load_settings, save
from kvjax.soft.layout import Batch, Region, Row, Shape, Text, Windows, collate, lay_out
from kvjax.soft.model import LCLM, add_memory_rows, hidden, logits, loss, new_model, targets

__all__ = [
    "LCLM",
    "Batch",
    "Context",
    "Region",
    "Row",
    "Shape",
    "SoftConfig",
    "Text",
    "Windows",
    "add_memory_rows",
    "collate",
    "encode_context",
    "hidden",
    "lay_out",
    "load",
    "load_encoder",
    "load_settings",
    "logits",
    "loss",
    "new_model",
    "prompt",
    "save",
    "targets",
]
