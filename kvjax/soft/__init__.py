"""Soft tokens: an encoder compresses text before the decoder sees it (LCLM, arXiv 2606.09659)."""

from kvjax.soft.config import SoftConfig
from kvjax.soft.layout import Batch, Region, Row, Shape, Text, Windows, collate, lay_out
from kvjax.soft.model import LCLM, add_memory_rows, hidden, logits, loss, new_model, targets

__all__ = [
    "LCLM",
    "Batch",
    "Region",
    "Row",
    "Shape",
    "SoftConfig",
    "Text",
    "Windows",
    "add_memory_rows",
    "collate",
    "hidden",
    "lay_out",
    "logits",
    "loss",
    "new_model",
    "targets",
]
