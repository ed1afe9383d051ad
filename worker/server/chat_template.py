"""A model's own chat template: messages in, a prompt out, and no way for a message to forge a turn.

Templates are Jinja as Hugging Face ``transformers`` runs it: sandboxed, immutable, with its few extra functions. The
special tokens in the result are the template's. Where a *message* spells one, those characters are plain text.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from worker.server.tokenizer import Tokenizer, UnsupportedTokenizer
from worker.weights.gguf import GGUFError, GGUFFile

_WIDEST_INDENT: Final = 16


class TemplateRefused(ValueError):
    """The template can't render these messages; the message says why, for the one who sent them."""


class UnusableModel(ValueError):
    """A model file can't be served; the message names it and says why."""


class _Raised(TemplateError):
    """What a template says through ``raise_exception``."""


def _raise_exception(message: str) -> NoReturn:
    raise _Raised(message)


def _strftime_now(pattern: str) -> str:
    # Templates ask for the date of where the server stands.
    return datetime.datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Options are the template's to choose, so each is held to its plain type: json takes classes and functions too.
    if indent is not None and not (type(indent) is int and 0 <= indent <= _WIDEST_INDENT):
        raise TypeError("indent is a small number or none")
    if separators is not None:
        item, key = separators
        if type(item) is not str or type(key) is not str:
            raise TypeError("separators are two texts")
        separators = (item, key)
    return json.dumps(
        value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
    )


class _GuardedNamespace(Namespace):
    """``namespace(...)``, which must not give a template a way to Python's internals."""

    def __init__(self, /, *args: Any, **values: Any) -> None:
        for name in dict(*args, **values):
            _refuse_private(name)
        super().__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set {name!r} on a namespace")


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's text for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template with its tokenizer. Safe to use from several threads."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """``source``: the Jinja text. Raises jinja2.TemplateSyntaxError, and whatever its constant parts raise."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["namespace"] = _GuardedNamespace
        self._template = environment.from_string(source)
        self.tokenizer = tokenizer

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[str | int]:
        """The prompt that asks for the assistant's next turn: plain text as text, special tokens as ids.

        Raises TemplateRefused.
        """
        veil = _Veil(self.tokenizer.special_tokens)
        try:
            rendered = self._template.render(
                messages=[veil.hide(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                bos_token=self.tokenizer.bos_token,
                eos_token=self.tokenizer.eos_token,
            )
        except _Raised as refused:
            raise TemplateRefused(f"The model's chat template refused the messages: {refused}") from None
        except Exception as fault:
            # A template is a program from elsewhere: it may fail in any way that Python code can.
            raise TemplateRefused("The model's chat template can't render messages of this form.") from fault
        pieces = self.tokenizer.split_special(rendered)
        return [piece if isinstance(piece, int) else veil.show(piece) for piece in pieces]

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt's token ids: special ids from the template alone. Raises TemplateRefused, UntokenizableText."""
        ids: list[int] = []
        for piece in self.render(messages):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self.tokenizer.encode(piece)
        return ids


def load_chat_template(path: Path) -> ChatTemplate:
    """The template and tokenizer of a GGUF file. Raises UnusableModel."""
    try:
        metadata = GGUFFile(path).metadata
        source = metadata["tokenizer.chat_template"]
        tokenizer = Tokenizer.from_gguf(metadata)
    except KeyError as missing:
        raise UnusableModel(f"{path} can't serve chats: it has no metadata {missing}.") from missing
    except (OSError, GGUFError, UnsupportedTokenizer) as fault:
        raise UnusableModel(f"{path} can't be served: {fault}") from fault
    if type(source) is not str:
        raise UnusableModel(f"{path} can't serve chats: its chat template is no text.")
    try:
        return ChatTemplate(source, tokenizer)
    except Exception as fault:
        # Compiling already runs the parts of a template that are constant: it may fail in any way, as rendering may.
        raise UnusableModel(f"{path} can't serve chats: its template can't be compiled: {fault}") from fault


class _Veil:
    """Replaces special tokens that a message spells by marks which nobody can guess, and puts their text back after
    the template's own special tokens have been found.

    Text that could become a special token together with the template's text beside it (it ends in the beginning of
    one, begins with the end of one, or is a piece of one) is kept apart by empty marks. All other text goes through
    untouched, so that what a template sees and makes of ordinary messages is what it always would be.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._tokens = sorted(special_tokens, key=len, reverse=True)
        # Private-use characters: no template's case folding, stripping or JSON changes them.
        nonce = "".join(chr(0xE100 + byte) for byte in os.urandom(12))
        self._empty = f"\ue000{nonce}\ue001"
        self._marks = {token: f"\ue000{nonce}{chr(0xE200 + at)}\ue001" for at, token in enumerate(self._tokens)}
        self._nonce = nonce
        self._used = False

    def hide(self, value: Any) -> Any:
        """``value`` with every text inside it veiled; numbers and the like as they are."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return value

    def _hide_text(self, text: str) -> str:
        if not text:
            return text
        given = text
        for token in self._tokens:
            text = text.replace(token, self._marks[token])
        inside = any(text in token for token in self._tokens)
        before = inside or any(_overlap(token, text) for token in self._tokens)
        after = inside or any(_overlap(text, token) for token in self._tokens)
        text = f"{self._empty if before else ''}{text}{self._empty if after else ''}"
        self._used |= text != given
        return text

    def show(self, text: str) -> str:
        """Undo ``hide``. Raises TemplateRefused if a template tore a mark apart."""
        if not self._used:
            return text
        text = text.replace(self._empty, "")
        for token, mark in self._marks.items():
            text = text.replace(mark, token)
        if any(self._nonce[at : at + 3] in text for at in range(len(self._nonce) - 2)):
            raise TemplateRefused("The model's chat template can't render the special tokens spelled in the messages.")
        return text


def _overlap(left: str, right: str) -> bool:
    """Whether some ending of ``left`` is a beginning of ``right``."""
    return any(left.endswith(right[:size]) for size in range(1, min(len(left), len(right)) + 1))
