"""A tokenizer rebuilt from a GGUF file's metadata, equal to the tokenizer.json it came from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from kvjax.io.files import FileError, quote
from kvjax.io.tokenizer import Tokenizer
from kvjax.models.config import DecoderConfig

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_MAX_PIECE = 512  # characters; no vocabulary has a longer piece, and all its splits are tried

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPLITS = {  # tokenizer.ggml.pre -> how text is split before merging
    "gpt-2": None, "default": None, "smollm": "digits", "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
}  # fmt: skip


def gguf_tokenizer(path: Path, data: Mapping[str, Any], config: DecoderConfig) -> Tokenizer | None:
    """The tokenizer, None where the file has none; FileError names the key that is damaged."""
    model = data.get("tokenizer.ggml.model", "none")
    if model == "none":
        return None
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(model, str) or model not in builders:
        raise FileError(path, f"tokenizer.ggml.model: {quote(model)} is none of gpt2, llama")
    tokens = _strings(path, data, "tokenizer.ggml.tokens")
    if not tokens or len(set(tokens)) != len(tokens):
        raise FileError(path, "tokenizer.ggml.tokens: empty, or a token is given twice")
    if len(tokens) > config.vocab_size:
        raise FileError(
            path, f"tokenizer.ggml.tokens: {len(tokens)}, the model has {config.vocab_size}"
        )
    try:
        backend = builders[model](path, data, tokens)
        _add_special(path, data, tokens, backend)
    except (FileError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the Rust code is no Exception
        raise FileError(path, f"tokenizer: {str(error)[:120]}") from None
    template = data.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return Tokenizer(backend, config.bos_id, config.eos_ids, template)


def _byte_level(path: Path, data: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """GPT-2's kind: bytes spelled as letters, merged by rank."""
    pre = data.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise FileError(path, f"tokenizer.ggml.pre: {quote(pre)} is none of {known}")
    ids = {token: i for i, token in enumerate(tokens)}
    merges = []
    for line in _strings(path, data, "tokenizer.ggml.merges"):
        # A space is spelled with another letter in these pieces: the first one divides the pair,
        # except that a piece may not be empty.
        left, _, right = line[1:].partition(" ")
        pair = (line[:1] + left, right)
        if pair[0] not in ids or pair[1] not in ids or "".join(pair) not in ids:
            raise FileError(path, f"tokenizer.ggml.merges: {quote(line)} is not made of tokens")
        merges.append(pair)
    split = _SPLITS[pre]
    model = models.BPE(ids, merges, fuse_unk=False, ignore_merges=split == _LLAMA3)
    backend = tokenizers.Tokenizer(model)
    if split == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(split: str | None) -> pre_tokenizers.PreTokenizer:
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "digits":
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(split), "isolated", invert=False)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "digits")
    return pre_tokenizers.Sequence([first, rest])


def _sentencepiece(path: Path, data: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece's kind (Llama 2, Gemma): pieces merged by score, bytes for what is unknown."""
    ids = {token: i for i, token in enumerate(tokens)}
    scores = _numbers(path, data, "tokenizer.ggml.scores", len(tokens))
    kinds = _kinds(path, data, len(tokens))
    unknown = data.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise FileError(path, f"tokenizer.ggml.unknown_token_id: {quote(unknown)}")
    merges = _merges(path, tokens, ids, scores, kinds)
    model = models.BPE(ids, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = bool(data.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    steps: list[Any] = [normalizers.Prepend("▁"), spaces] if prefix else [spaces]
    backend.normalizer = normalizers.Sequence(steps)
    decode: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(decode + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return backend


def _merges(
    path: Path, tokens: list[str], ids: dict[str, int], scores: np.ndarray, kinds: np.ndarray
) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best-scored piece first."""
    found = []
    for i in np.flatnonzero(kinds == _NORMAL):
        piece = tokens[i]
        if len(piece) > _MAX_PIECE:
            raise FileError(path, f"tokenizer.ggml.tokens: {quote(piece)} is {len(piece)} long")
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-float(scores[i]), left, right))
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


def _add_special(
    path: Path, data: Mapping[str, Any], tokens: list[str], backend: tokenizers.Tokenizer
) -> None:
    kinds = _kinds(path, data, len(tokens))
    added = []
    for i, kind in enumerate(kinds.tolist()):
        special = kind in (_UNKNOWN, _CONTROL)
        if tokens[i] and (special or kind == _USER_DEFINED):
            added.append(AddedToken(tokens[i], special=special, normalized=False))
    backend.add_tokens(added)
    first, last = _edge(path, data, tokens, "bos"), _edge(path, data, tokens, "eos")
    edges = {"B": first, "E": last}  # stand-ins: a token's own text may not suit the template
    marks = [{"id": n, "ids": [e[1]], "tokens": [e[0]]} for n, e in edges.items() if e]
    if marks:
        template = ["B"] * bool(first) + ["$A"] + ["E"] * bool(last)
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, "$B:1"], special_tokens=marks
        )


def _edge(
    path: Path, data: Mapping[str, Any], tokens: list[str], name: str
) -> tuple[str, int] | None:
    """The token that this tokenizer puts before (bos) or after (eos) every text."""
    default = name == "bos" and data["tokenizer.ggml.model"] == "llama"
    if not data.get(f"tokenizer.ggml.add_{name}_token", default):
        return None
    token_id = data.get(f"tokenizer.ggml.{name}_token_id")
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise FileError(path, f"tokenizer.ggml.{name}_token_id: {quote(token_id)} is no token")
    return tokens[token_id], token_id


def _strings(path: Path, data: Mapping[str, Any], key: str) -> list[str]:
    value = data.get(key)
    if not isinstance(value, list):
        raise FileError(path, f"{key}: is missing or not a list of texts")
    return value


def _numbers(path: Path, data: Mapping[str, Any], key: str, count: int) -> np.ndarray:
    value = data.get(key)
    if not isinstance(value, np.ndarray) or len(value) != count:
        raise FileError(path, f"{key}: is missing or not {count} numbers")
    return value


def _kinds(path: Path, data: Mapping[str, Any], count: int) -> np.ndarray:
    if "tokenizer.ggml.token_type" not in data:
        return np.ones(count, np.int32)
    return _numbers(path, data, "tokenizer.ggml.token_type", count)
