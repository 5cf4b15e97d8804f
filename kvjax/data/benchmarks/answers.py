"""Answers found in a model's text: the last box, the final number."""

import re
from decimal import Decimal

# A minus after a word or a digit is an operator.
_NUMBER = re.compile(r"(?:(?<!\w)-)?(?:\d[\d,]*)?\.?\d+")
BOX_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


def last_box(text: str) -> str | None:
    r"""Content of the last closed \boxed{…} (or \fbox{…}), braces balanced; None without one."""
    for start in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth, at = 1, start.end()
        while at < len(text) and depth:
            escaped = text[at - 1] == "\\"
            depth += 0 if escaped else {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        if not depth:
            return text[start.end() : at - 1].strip()
    return None


def number(text: str) -> Decimal | None:
    """The last number in `text`, thousands separators dropped ("," or "{,}"); None without one."""
    found = _NUMBER.findall(text.replace("{,}", ","))
    return Decimal(found[-1].replace(",", "")) if found else None


def final_number(text: str) -> Decimal | None:
    """The number after the last "####", else in the last box, else the last one of the text."""
    _, mark, tail = text.rpartition("####")
    if mark:
        return number(tail.strip().partition("\n")[0])
    box = last_box(text)
    return number(text if box is None else box)
