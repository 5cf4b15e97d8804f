"""Real text by name, read from packages that are already installed. Nothing is downloaded here."""

from kvjax.data.corpora import SOURCES, Text, load_text, titles

__all__ = ["SOURCES", "Text", "load_text", "titles"]
