"""A tokenizer with what a decoder needs of it: ids, text, special ids and the chat template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvjax.io.files import FileError, file_size, quote, read_json, write_json


class Tokenizer:
    """Text to ids and back, as the Hugging Face tokenizer of the same files does it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        template: str | None = None,
    ):
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.template = template

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with a beginning-of-text id where the tokenizer itself adds one."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids` (a sequence or a one-dimensional array of integers)."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt for `messages` ({"role", "content"}) by the chat template, in a sandbox.

        ValueError where there is no template or it refuses the messages. The prompt holds its own
        special tokens: encode it with add_special_tokens=False.
        """
        if self.template is None:
            raise ValueError("chat: this tokenizer has no chat template; write the prompt yourself")
        try:
            return _environment().from_string(self.template).render(
                messages=messages, add_generation_prompt=add_generation_prompt,
                bos_token=self._token(self.bos_id),
                eos_token=self._token(next(iter(self.eos_ids), None)),
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, ArithmeticError, LookupError) as error:
            raise ValueError(f"chat: the template refuses the messages: {error}") from None

    def save(self, folder: Path | str) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which transformers reads too."""
        folder = Path(folder)
        self.backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if self.bos_id is not None:
            config["bos_token"] = self._token(self.bos_id)
        if self.eos_ids:
            config["eos_token"] = self._token(self.eos_ids[0])
            write_json(folder / "generation_config.json", {"eos_token_id": list(self.eos_ids)})
        if self.template is not None:
            config["chat_template"] = self.template
        write_json(folder / "tokenizer_config.json", config)

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else self.backend.id_to_token(token_id) or ""


def load_tokenizer(folder: Path, eos_ids: Sequence[int] = ()) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, None where it has no tokenizer.json.

    `eos_ids` are the model config's; those of generation_config.json and tokenizer_config.json
    join them, since chat models often name their end of turn only there.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    backend = _backend(path)
    config = _optional_json(folder / "tokenizer_config.json")
    bos, eos = (_special_id(backend, config.get(key)) for key in ("bos_token", "eos_token"))
    more = _optional_json(folder / "generation_config.json").get("eos_token_id")
    more = [i for i in (more if isinstance(more, list) else [more]) if type(i) is int and i >= 0]
    ends = ([] if eos is None else [eos]) + list(eos_ids) + more
    return Tokenizer(backend, bos, ends, _template(folder, config))


def _backend(path: Path) -> tokenizers.Tokenizer:
    file_size(path)  # FileError if it is no plain file
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the Rust code is no Exception
        raise FileError(path, f"is no tokenizer: {str(error)[:120]}") from None
    backend.no_truncation()  # a file may ask for either; a text's ids would depend on it
    backend.no_padding()
    return backend


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """A special token is a string, or an object with its text in `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(token) if isinstance(token, str) else None


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        if file_size(path) > 1 << 20:
            raise FileError(path, "a chat template of more than 1 MiB")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise FileError(path, "is not UTF-8 text") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise FileError(folder / "tokenizer_config.json", f"chat_template: {quote(template)}")
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: trimmed blocks, loop controls and two functions."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
