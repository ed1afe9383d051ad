"""The ways in which families of models write tool calls, and which one a chat template belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from worker.server.structured import lark_string
from worker.server.tools import hermes, llama3, mistral
from worker.server.tools.buffered import BufferedParser
from worker.server.tools.hermes import HermesParser
from worker.server.tools.llama3 import Llama3Parser
from worker.server.tools.mistral import MistralParser
from worker.server.tools.pieces import ToolCallParser, new_call_id

MAX_FORCED_CALLS: Final = 16
"""Most calls in one forced answer: where nothing else ends it, a small model would go on calling."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model is trained to write around the arguments of its calls."""

    head: str
    """Before the arguments; ``{name}`` stands for the tool's name."""
    tail: str = ""
    separator: str = ""
    before: str = ""
    """Before the first call; and after the last one: ``after``."""
    after: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's format: how to find calls in its text, and how to force calls."""

    name: str
    markers: tuple[str, ...]
    """Texts that are special tokens in some vocabularies. There the detokenizer must show them to the parser."""
    layout: Layout
    make_parser: Callable[[Collection[str], Callable[[], str]], BufferedParser]
    special_tokens: Mapping[str, int]
    """The vocabulary's, text -> id."""

    def parser(self, names: Collection[str], new_id: Callable[[], str] = new_call_id) -> ToolCallParser:
        """A parser for one answer. ``names``: of the tools that may be called."""
        return self.make_parser(names, new_id)

    def forced(self, tools: Sequence[tuple[str, str]], *, parallel: bool) -> str:
        """A grammar, in Lark, of one call, or of several if ``parallel``, and nothing else.

        ``tools``: name and JSON schema of the arguments, as JSON text, of each tool that may be called.
        """
        layout = self.layout
        calls = " | ".join(f"call_{at}" for at in range(len(tools)))
        more = f"({self._literal(layout.separator)} call){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
        rules = [f"start: {self._literal(layout.before)} call {more} {self._literal(layout.after)}", f"call: {calls}"]
        for at, (name, schema) in enumerate(tools):
            head = layout.head.replace("{name}", name)
            rules += [
                f"call_{at}: {self._literal(head)} arguments_{at} {self._literal(layout.tail)}",
                f"arguments_{at}: %json {schema}",
            ]
        return "\n".join(rules)

    def _literal(self, text: str) -> str:
        """``text`` in Lark: a marker that is a special token by its id, the rest as strings."""
        special = [marker for marker in self.markers if marker in self.special_tokens]
        pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
        return " ".join(
            f"<[{self.special_tokens[piece]}]>" if at % 2 else lark_string(piece)
            for at, piece in enumerate(pieces)
            if piece
        )


_OBJECT: Final = '{"name": "{name}", "arguments": '

_FORMATS: Final = {
    "hermes": ToolFormat(
        "hermes",
        (hermes.OPENING, hermes.CLOSING),
        Layout(head=f"{hermes.OPENING}\n{_OBJECT}", tail=f"}}\n{hermes.CLOSING}", separator="\n"),
        HermesParser,
        {},
    ),
    "llama3": ToolFormat(
        "llama3",
        (llama3.TAG,),
        Layout(head='{"name": "{name}", "parameters": ', tail="}", separator="; "),
        Llama3Parser,
        {},
    ),
    "mistral": ToolFormat(
        "mistral",
        (mistral.MARKER, mistral.CALL_ID, mistral.ARGS),
        Layout(head=_OBJECT, tail="}", separator=", ", before=f"{mistral.MARKER} [", after="]"),
        MistralParser,
        {},
    ),
}
_ALIASES: Final = {"qwen": "hermes", "qwen25": "hermes", "llama3_json": "llama3"}
FORMAT_NAMES: Final = tuple(_FORMATS)


def tool_format_of(
    chat_template_source: str, name: str | None = None, special_tokens: Mapping[str, int] | None = None
) -> ToolFormat:
    """The format of a model, by the name of its family or else guessed from its chat template.

    ``special_tokens``: the vocabulary's, text -> id. Templates that show no calls get Hermes' format, the most common.
    Raises ValueError for an unknown name.
    """
    if name is None:
        name = _guessed(chat_template_source)
    name = _ALIASES.get(name, name)
    if name not in _FORMATS:
        raise ValueError(f"there is no tool-call format {name!r} (there are: {', '.join(FORMAT_NAMES)})")
    found = _FORMATS[name]
    layout = found.layout
    if name == "mistral":
        if mistral.ARGS in chat_template_source:
            layout = Layout(head=f"{mistral.MARKER}{{name}}{mistral.ARGS}")
        elif f"{mistral.MARKER}[" in chat_template_source:
            layout = replace(layout, before=f"{mistral.MARKER}[")
    return replace(found, layout=layout, special_tokens=dict(special_tokens or {}))


def _guessed(template: str) -> str:
    if mistral.MARKER in template:
        return "mistral"
    if hermes.OPENING in template:
        return "hermes"
    if llama3.TAG in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama3"
    return "hermes"
