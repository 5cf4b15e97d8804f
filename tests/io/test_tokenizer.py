"""Tokenizers: rebuilt from GGUF metadata they equal the tokenizer.json of the same vocabulary."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from kvjax.io.files import FileError
from kvjax.io.gguf_tokenizer import gguf_tokenizer
from kvjax.io.tokenizer import Tokenizer, load_tokenizer
from kvjax.models.config import DecoderConfig, LayerConfig

TEXT = [
    "The quick brown fox, it's 1234 years old; doesn't jump over 56 lazy dogs.\n\n  Indented\ttext",
    "Déjà vu: naïve café 東京 I'LL 'S x²  y³ ... !!! 100,000.25   \r\n end ",
] * 20
CONTROLS = ["<pad>", "<s>", "</s>", "<|end|>"]
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def config(vocab_size: int = 2000) -> DecoderConfig:
    return DecoderConfig(
        "llama", vocab_size, 8, 8, 2, 2, 4, (LayerConfig(),), 64, bos_id=1, eos_ids=(2,)
    )


def reference(pre: str) -> tokenizers.Tokenizer:
    """What the published tokenizer.json of this kind says, trained on a little text."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("smollm", "gpt-2"))
    first: dict[str, Any] = {
        "smollm": pre_tokenizers.Digits(individual_digits=True),
        "qwen2": pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        "llama-bpe": pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
    }
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([first[pre], level]) if pre in first else level
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=CONTROLS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(TEXT, trainer)
    return backend


def metadata(backend: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.token_type": np.int32([3 if t in CONTROLS else 1 for t in tokens]),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip


def rebuilt(data: dict[str, Any]) -> Tokenizer:
    tokenizer = gguf_tokenizer(Path("m.gguf"), data, config())
    assert tokenizer is not None
    return tokenizer


PRES = ("gpt-2", "smollm", "qwen2", "llama-bpe")
PAIRS = {pre: (reference(pre), rebuilt(metadata(reference(pre), pre))) for pre in PRES}


@pytest.mark.parametrize("pre", PRES)
@given(text=st.text(max_size=40) | st.text("aàé e1234 '\n\t.lsth²", max_size=40))
def test_byte_level_equals_tokenizer_json(pre: str, text: str) -> None:
    published, ours = PAIRS[pre]
    assert ours.encode(text) == published.encode(text).ids
    if pre != "qwen2":  # which normalizes
        assert ours.decode(ours.encode(text)) == text or any(c in text for c in CONTROLS)


@pytest.mark.parametrize("pre", PRES)
def test_byte_level_on_prose_and_control_tokens(pre: str) -> None:
    published, ours = PAIRS[pre]
    for text in (*TEXT[:2], "<s>user</s>\n<|end|> <pad>x"):
        assert ours.encode(text) == published.encode(text).ids
    assert ours.encode("a<|end|>")[-1] == 3 and ours.decode([3]) == ""
    assert ours.decode([3], skip_special_tokens=False) == "<|end|>"
    assert ours.vocab_size == published.get_vocab_size()


def test_digits_are_split_as_each_kind_splits_them() -> None:
    def parts(pre: str) -> list[str]:
        ours = PAIRS[pre][1].backend
        return [text for text, _ in ours.pre_tokenizer.pre_tokenize_str("1234567")]

    assert parts("gpt-2") == ["1234567"]
    assert parts("smollm") == parts("qwen2") == list("1234567")
    assert parts("llama-bpe") == ["123", "456", "7"]


def test_a_bos_is_added_where_the_file_says_so() -> None:
    data = metadata(reference("gpt-2"), "gpt-2")
    plain = rebuilt(data).encode("hello")
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = rebuilt(data | both)
    assert tokenizer.encode("hello") == [1, *plain, 2]
    assert tokenizer.encode("hello", add_special_tokens=False) == plain
    assert tokenizer.decode([1, *plain, 2]) == "hello"


SPM_TEXT = ["the▁cat", "the▁hat", "a▁cathedral", "▁the▁theme▁of▁the▁cat"] * 5


def sentencepiece() -> dict[str, Any]:
    """Pieces learnt by pair merging, scored by their rank, with a token for every byte."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.train_from_iterator(SPM_TEXT, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    vocab = backend.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.float32(scores), "tokenizer.ggml.token_type": np.int32(kinds),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip


SPM = sentencepiece()
SPM_OURS = {prefix: rebuilt(SPM | {"tokenizer.ggml.add_space_prefix": prefix})
            for prefix in (True, False)}  # fmt: skip


def by_score(text: str) -> list[int]:
    """SentencePiece's rule: while two neighbours make a piece, merge the best-scored, leftmost."""
    ids = {token: i for i, token in enumerate(SPM["tokenizer.ggml.tokens"])}
    scores = SPM["tokenizer.ggml.scores"]
    parts = list(text)
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(zip(parts, parts[1:]))  # noqa: B905
                 if a + b in ids]  # fmt: skip
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return found


@given(text=st.text("the cadrlmofé東", max_size=30), prefix=st.booleans())
def test_sentencepiece_merges_by_score(text: str, prefix: bool) -> None:
    ours = SPM_OURS[prefix]
    spaced = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    assert ours.encode(text) == [1, *by_score(spaced)]
    assert ours.decode(ours.encode(text)) == text


def refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message) as caught:
        gguf_tokenizer(Path("m.gguf"), data, config())
    assert str(caught.value).startswith("m.gguf: ") and "\n" not in str(caught.value)


def test_unknown_and_damaged_metadata_is_named() -> None:
    data = metadata(PAIRS["gpt-2"][0], "gpt-2")
    assert gguf_tokenizer(Path("m.gguf"), {}, config()) is None
    refused(data | {"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model: 'bert'")
    refused(data | {"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre: 'tekken'")
    refused(data | {"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens: is missing")
    refused(data | {"tokenizer.ggml.tokens": ["a", "a"]}, "is given twice")
    refused(data | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(2001)]}, "the model has 2000")
    refused(data | {"tokenizer.ggml.merges": ["zq zq"]}, "'zq zq' is not made of tokens")
    refused(data | {"tokenizer.ggml.token_type": np.int32([1])}, "tokenizer.ggml.token_type")
    refused(
        data | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**6},
        "tokenizer.ggml.bos_token_id: 1000000 is no token",
    )
    refused(SPM | {"tokenizer.ggml.scores": [0.0]}, "tokenizer.ggml.scores")
    refused(SPM | {"tokenizer.ggml.unknown_token_id": -1}, "tokenizer.ggml.unknown_token_id: -1")
    long = [*SPM["tokenizer.ggml.tokens"][:-1], "x" * 600]
    refused(SPM | {"tokenizer.ggml.tokens": long}, "is 600 long")


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n{% if m.role == 'tool' %}{{ raise_exception('no') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_chat_template_in_a_sandbox() -> None:
    ours = PAIRS["smollm"][1]
    tokenizer = Tokenizer(ours.backend, 1, (2,), TEMPLATE)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.chat(messages) == "<s>[user]Hi</s>[assistant]"
    assert tokenizer.chat(messages, add_generation_prompt=False) == "<s>[user]Hi</s>"
    with pytest.raises(ValueError, match="no chat template"):
        ours.chat(messages)
    with pytest.raises(ValueError, match="the template refuses the messages: no"):
        tokenizer.chat([{"role": "tool", "content": ""}])
    for template in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% if %}"):
        with pytest.raises(ValueError, match="chat: the template"):
            Tokenizer(ours.backend, 1, (2,), template).chat(messages)


def test_save_and_load(tmp_path: Path) -> None:
    published, ours = PAIRS["qwen2"]
    Tokenizer(ours.backend, 1, (2, 3), TEMPLATE).save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert (again.bos_id, again.eos_ids, again.template) == (1, (2, 3), TEMPLATE)
    assert again.encode(TEXT[0]) == published.encode(TEXT[0]).ids
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    again = load_tokenizer(tmp_path, eos_ids=(7,))
    assert again is not None and again.eos_ids == (2, 7, 3)
    assert again.chat([{"role": "user", "content": "x"}]) == "x"


def test_damaged_tokenizer_files_are_named(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    path = tmp_path / "tokenizer.json"
    for text in ("", "{}", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'):
        path.write_text(text)
        with pytest.raises(FileError, match=r"tokenizer.json: is no tokenizer"):
            load_tokenizer(tmp_path)
    PAIRS["gpt-2"][0].save(str(path))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(FileError, match="tokenizer_config.json: chat_template: 5"):
        load_tokenizer(tmp_path)
