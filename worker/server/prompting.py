"""What a chat request says about its prompt: the messages, the tools, and how the template is to be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from worker.protocol.errors import bad_request
from worker.server.body import invalid, shown
from worker.server.messages import read_messages
from worker.server.tools import ToolUse

_RESERVED: Final = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")
)
"""Names of a template's variables that have fields or sources of their own."""


class PromptFields(Protocol):
    """The fields of a request, as chats and ``/tokenize`` have them."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Prompting:
    """What the chat template is given. ``messages`` are as templates expect them."""

    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    """As the request has them; None: none may be called."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of the assistant's turn."""
    continue_final_message: bool = False
    """Whether the prompt ends inside the last message, so that the answer goes on with it."""
    variables: dict[str, Any] = field(default_factory=dict)
    """More variables of the template's."""

    text_bytes: int = 0
    """Bytes of UTF-8 that the messages' texts have, those of tool calls among them."""
    tool_bytes: int = 0
    """The same of the tools."""


def read_prompting(messages: list[dict[str, Any]], fields: PromptFields, tools: ToolUse) -> Prompting:
    """Raises ApiError (400)."""
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise bad_request(
            "'continue_final_message' and 'add_generation_prompt' can't both be true: the answer either goes on with "
            "the last message or begins a new one.",
            param="continue_final_message",
            code="invalid_value",
        )
    read = read_messages(messages)
    if continues and not read[-1]["content"]:
        raise invalid(
            "'continue_final_message' needs text in the last message to go on with.", "continue_final_message"
        )
    variables = fields.chat_template_kwargs or {}
    for name in variables:
        if name in _RESERVED or name == "self" or not name.isidentifier():
            raise invalid(
                f"'chat_template_kwargs' may not set {shown(name)}."
                + (" It has a field of its own." if name in _RESERVED else ""),
                "chat_template_kwargs",
            )
    return Prompting(
        messages=read,
        tools=tools.for_template,
        add_generation_prompt=not continues if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continue_final_message=continues,
        variables=variables,
        text_bytes=_text_bytes(read),
        tool_bytes=_text_bytes(tools.for_template),
    )


def _text_bytes(value: Any) -> int:
    """Bytes of all texts in ``value``, as JSON has it, however deep it is nested; what is no text counts as one."""
    size = 0
    rest = [] if value is None else [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item.encode())
        elif isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence):
            rest += item
        else:
            size += 1
    return size
