"""Text to token ids and back, from the files next to a checkpoint. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

_DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class TokenizerError(ValueError):
    """The tokenizer's files cannot be used, or a chat does not fit the model's template."""


class Tokenizer:
    """Encodes and decodes with tokenizer.json; chats go through the checkpoint's template, or a plain default one."""

    def __init__(self, backend: BackendTokenizer, settings: Mapping[str, Any], chat_template: str | None) -> None:
        """`settings` is the content of tokenizer_config.json; `chat_template` is Jinja source."""
        self._backend = backend
        self._specials = {
            name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        self._template_source = chat_template or _DEFAULT_CHAT_TEMPLATE

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face directory; None where it has no tokenizer.json (token ids only).

        The chat template is chat_template.jinja, else `chat_template` of tokenizer_config.json (of several named
        ones the one called "default").

        Raises:
            TokenizerError: a file is there but cannot be parsed.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            backend = BackendTokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{file}: {error}") from error
        settings = _read_settings(directory / "tokenizer_config.json")
        template_file = directory / "chat_template.jinja"
        if template_file.is_file():
            return cls(backend, settings, template_file.read_text(encoding="utf-8"))
        return cls(backend, settings, _default_template(settings.get("chat_template")))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size())

    @property
    def eos_token_id(self) -> int | None:
        """Id of tokenizer_config.json's eos_token, if it names one."""
        eos = self._specials["eos_token"]
        return self._backend.token_to_id(eos) if eos else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelled out in it are recognised.

        With `add_special_tokens` the tokenizer's own post-processing (such as a leading bos) applies.
        """
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def least_tokens(self, text: str) -> int:
        """A lower bound, at once, of how many tokens `text` has: its bytes over those of the longest token.

        0 for tokenizers that may drop parts of a text; byte-level BPE, which all served families use, keeps every byte.
        """
        return len(text.encode()) // self._longest_token if self._keeps_every_byte else 0

    @cached_property
    def _keeps_every_byte(self) -> bool:
        backend = self._backend
        strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        byte_level = isinstance(backend.model, models.BPE) and isinstance(backend.decoder, decoders.ByteLevel)
        return byte_level and backend.normalizer is None and not strips

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of text one token stands for at most; the vocabulary spells a byte with one character or more."""
        return max((len(token.encode()) for token in self._backend.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that form no character come out as U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """The text of a single token, special ones included: how it is shown beside its log-probability."""
        return self.decode([token_id], skip_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The chat as the text the model was trained on; messages are {"role": ..., "content": ...}.

        The template writes the special tokens: encode it with `add_special_tokens=False`.

        Raises:
            TokenizerError: the template is broken or refuses these messages.
        """
        specials = {name: token or "" for name, token in self._specials.items()}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **specials,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise TokenizerError(f"chat template: {error}") from error

    @cached_property
    def _template(self) -> Template:
        # A template comes with the checkpoint, so it must not reach the process: the sandbox forbids attributes
        # with underscores and changes to its arguments.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _tojson
        return environment.from_string(self._template_source)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path}: holds {type(settings).__name__}; legal: a JSON object")
    return settings


def _content(token: object) -> str | None:
    """A special token is written as a string or as an object with its `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _default_template(value: object) -> str | None:
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None
