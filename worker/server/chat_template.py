"""A model's own chat template: messages in, a prompt out, and no way for a message to forge a turn.

Templates are Jinja as Hugging Face ``transformers`` runs it: sandboxed, immutable, with its few extra functions. The
special tokens in the result are the template's. Where a *message* spells one, those characters are plain text.
"""

from __future__ import annotations

import datetime
import json
import re
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
from worker.server.veil import TornMark, Veil
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
        self.source = source
        self.tokenizer = tokenizer
        self.shows_tools = re.search(r"\btools\b", source) is not None
        """Whether the template has a place for tools."""
        self._knows_developers = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[str | int]:
        """The prompt that asks for the assistant's next turn: plain text as text, special tokens as ids.

        ``messages`` have ``role`` and ``content`` (text), and may have what else templates read: ``name``,
        ``tool_calls``, ``tool_call_id``. With ``continue_final_message`` the prompt ends inside the last of them.
        ``variables``: more of the template's own. Raises TemplateRefused.
        """
        veil = Veil(self.tokenizer.special_tokens)
        last = ""
        try:
            given = [self._message(message, veil) for message in messages]
            if continue_final_message:
                last = given[-1]["content"]
                given[-1]["content"] = last + veil.end
            rendered = self._template.render(
                **{"documents": None} | veil.hide_data(dict(variables or {})),
                messages=given,
                tools=None if tools is None else veil.hide_data(list(tools)),
                add_generation_prompt=add_generation_prompt,
                bos_token=self.tokenizer.bos_token,
                eos_token=self.tokenizer.eos_token,
            )
        except _Raised as refused:
            raise TemplateRefused(
                f"The model's chat template refused the messages: {veil.show_loosely(str(refused))}"
            ) from None
        except Exception as fault:
            # A template is a program from elsewhere: it may fail in any way that Python code can. What is nested too
            # deeply comes here, too.
            raise TemplateRefused("The model's chat template can't render messages of this form.") from fault
        try:
            if continue_final_message:
                rendered = veil.cut_at_end(rendered, last)
            pieces = self.tokenizer.split_special(rendered)
            return [piece if isinstance(piece, int) else veil.show(piece) for piece in pieces]
        except TornMark as torn:
            raise TemplateRefused(f"The model's chat template can't render {torn}.") from None

    def _message(self, message: Mapping[str, Any], veil: Veil) -> dict[str, Any]:
        role = message["role"]
        # What newer clients call the system; few templates know it by that name.
        given = {"role": "system" if role == "developer" and not self._knows_developers else role}
        for name, value in message.items():
            if name == "tool_calls":
                given[name] = veil.hide_data(value)
            elif name != "role":
                given[name] = veil.hide(value)
        return given

    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The prompt's token ids: special ids from the template alone. ``options``: those of ``render``.

        Raises TemplateRefused, UntokenizableText.
        """
        ids: list[int] = []
        for piece in self.render(messages, **options):
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
