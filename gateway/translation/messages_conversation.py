"""The messages of a chat completion as Anthropic's Messages API has them: a system prompt, and turns that alternate.

Anthropic refuses texts that are empty: they are left out. Results of tools stand first in the turn behind the calls.
References: https://platform.claude.com/docs/en/build-with-claude/working-with-messages,
https://platform.claude.com/docs/en/agents-and-tools/tool-use/handle-tool-calls
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.ask import Body
from gateway.translation.chat_fields import ITEMS, NULL, TEXT, is_null, read
from gateway.translation.content_blocks import WRAPPED
from gateway.translation.messages_media import document, image
from worker.protocol.errors import bad_request

MAX_ITEMS = 20_000
"""Messages, parts and calls of a request, all together: each is read one by one, while others wait."""
Block = dict[str, Any]

_ID = re.compile(r"[a-zA-Z0-9_-]{1,128}")


class _Message(msgspec.Struct):
    role: str
    content: msgspec.Raw = NULL
    refusal: str | None = None
    name: str | None = None
    tool_calls: msgspec.Raw = NULL
    tool_call_id: str | None = None
    function_call: msgspec.Raw = NULL
    cache_control: msgspec.Raw = NULL


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: msgspec.Raw = NULL
    file: msgspec.Raw = NULL
    cache_control: msgspec.Raw = NULL


class _Call(msgspec.Struct):
    id: str | None = None
    type: str = "function"
    function: msgspec.Raw = NULL


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


_MESSAGE = msgspec.json.Decoder(_Message)
_PART = msgspec.json.Decoder(_Part)
_CALL = msgspec.json.Decoder(_Call)
_FUNCTION = msgspec.json.Decoder(_Function)
_INPUT = msgspec.json.Decoder(Body)


@dataclass(slots=True)
class Conversation:
    system: list[Block] = field(default_factory=list)
    messages: list[Block] = field(default_factory=list)
    ends_in_results: bool = False
    """Whether the last turn brings results of tools."""


def conversation(messages: msgspec.Raw) -> Conversation:
    """Raises ApiError (400) that names the message."""
    return _Reader().read(messages)


@dataclass(slots=True)
class _Turn:
    role: str
    results: list[Block] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


class _Reader:
    def __init__(self) -> None:
        self._system: list[Block] = []
        self._turns: list[_Turn] = []
        self._items = 0
        self._legacy_calls: dict[str, str] = {}
        """Ids made up for calls that had none, by function: of the latest."""

    def read(self, messages: msgspec.Raw) -> Conversation:
        items = self._counted(read(messages, ITEMS, "messages"))
        last = None
        for at, item in enumerate(items):
            last = read(item, _MESSAGE, f"messages[{at}]")
            self._message(last, f"messages[{at}]")
        if not self._turns and self._system:
            # Anthropic wants a user's message; OpenAI is content with a system's.
            self._turns.append(_Turn("user", blocks=self._system))
            self._system = []
        turns = self._turns
        if last is not None and last.role == "assistant" and turns and turns[-1].role == "assistant":
            _end_without_space(turns)
        if not turns:
            raise bad_request("'messages' have no content. Send a message with a text.", param="messages")
        return Conversation(
            self._system,
            [{"role": turn.role, "content": turn.results + turn.blocks} for turn in turns],
            bool(turns[-1].results),
        )

    def _message(self, message: _Message, where: str) -> None:
        match message.role:
            case "system" | "developer":
                self._system += self._blocks(message, where, media=False)
            case "user":
                self._add("user", self._blocks(message, where, media=True))
            case "assistant":
                self._add("assistant", self._answer(message, where))
            case "tool":
                if not message.tool_call_id:
                    raise bad_request(
                        f"'{where}.tool_call_id' must name the call that this is the result of.",
                        param=f"{where}.tool_call_id",
                    )
                self._result(message, message.tool_call_id, where)
            case "function":
                name = message.name or ""
                if name not in self._legacy_calls:
                    raise bad_request(f"'{where}' is the result of a function that was not called.", param=where)
                self._result(message, self._legacy_calls[name], where)
            case _:
                raise bad_request(
                    f"'{where}.role' must be system, developer, user, assistant or tool.", param=f"{where}.role"
                )

    def _answer(self, message: _Message, where: str) -> list[Block]:
        blocks = self._blocks(message, where, media=False)
        if message.refusal and message.refusal.strip():
            blocks.append({"type": "text", "text": message.refusal})
        if not is_null(message.tool_calls):
            calls = self._counted(read(message.tool_calls, ITEMS, f"{where}.tool_calls"))
            for at, item in enumerate(calls):
                blocks.append(_tool_use(item, f"{where}.tool_calls[{at}]"))
        elif not is_null(message.function_call):
            function = read(message.function_call, _FUNCTION, f"{where}.function_call")
            id = self._legacy_calls[function.name] = f"call_{len(self._turns)}"
            blocks.append({"type": "tool_use", "id": id, "name": function.name, "input": _input(function.arguments)})
        return blocks

    def _result(self, message: _Message, call: str, where: str) -> None:
        result: Block = {"type": "tool_result", "tool_use_id": _id(call)}
        if not is_null(message.cache_control):
            result["cache_control"] = message.cache_control
            message.cache_control = NULL
        if content := self._blocks(message, where, media=True):
            result["content"] = content
        self._add("user", [], [result])

    def _add(self, role: str, blocks: list[Block], results: list[Block] | None = None) -> None:
        if not blocks and not results:
            return
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role))
        self._turns[-1].blocks += blocks
        self._turns[-1].results += results or []

    def _blocks(self, message: _Message, where: str, *, media: bool) -> list[Block]:
        """``media``: images and files may stand here, too."""
        where = f"{where}.content"
        content = message.content
        if is_null(content):
            blocks = []
        elif bytes(content).startswith(b"["):
            parts = self._counted(read(content, ITEMS, where))
            read_parts = [
                _block(read(part, _PART, f"{where}[{at}]"), f"{where}[{at}]", media) for at, part in enumerate(parts)
            ]
            blocks = [block for block in read_parts if block is not None]
        else:
            text = read(content, TEXT, where)
            blocks = [{"type": "text", "text": text}] if text.strip() else []
        if blocks and not is_null(message.cache_control):
            blocks[-1]["cache_control"] = message.cache_control
        return blocks

    def _counted(self, items: list[msgspec.Raw]) -> list[msgspec.Raw]:
        self._items += len(items)
        if self._items > MAX_ITEMS:
            raise bad_request(
                f"'messages' have more than {MAX_ITEMS} messages, parts and calls together. Send fewer.",
                param="messages",
            )
        return items


def _block(part: _Part, where: str, media: bool) -> Block | None:
    """None for a text that is empty."""
    block: Block
    if part.type in ("text", "refusal"):
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise bad_request(f"'{where}.{part.type}' must be text.", param=f"{where}.{part.type}")
        if not text.strip():
            return None
        block = {"type": "text", "text": text}
    elif media and part.type == "image_url":
        block = {"type": "image", "source": image(part.image_url, f"{where}.image_url")}
    elif media and part.type == "file":
        block = document(part.file, f"{where}.file")
    else:
        kinds = "text, image_url or file" if media else "text"
        raise bad_request(
            f"'{where}.type' is {part.type[:40]!r}, but this model takes {kinds} here. Leave the part out, or ask "
            "another model.",
            param=f"{where}.type",
        )
    if not is_null(part.cache_control):
        block["cache_control"] = part.cache_control
    return block


def _tool_use(item: msgspec.Raw, where: str) -> Block:
    call = read(item, _CALL, where)
    if call.type != "function" or is_null(call.function):
        raise bad_request(
            f"This model knows calls of functions only, and '{where}' is another. Leave it out.", param=where
        )
    if not call.id:
        raise bad_request(f"'{where}.id' must be the id of the call.", param=f"{where}.id")
    function = read(call.function, _FUNCTION, f"{where}.function")
    return {"type": "tool_use", "id": _id(call.id), "name": function.name, "input": _input(function.arguments)}


def _input(arguments: str) -> Any:
    """What a model once wrote for arguments. Where that is no JSON object, as models will have it, it is put into one:
    a conversation must not end because of it."""
    if not arguments.strip():
        return {}
    try:
        _INPUT.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {WRAPPED: arguments}
    return msgspec.Raw(arguments.encode())


def _id(call: str) -> str:
    """As it is where Anthropic takes such; else another in its place, always the same."""
    return call if _ID.fullmatch(call) else "call_" + hashlib.sha256(call.encode()).hexdigest()[:24]


def _end_without_space(turns: list[_Turn]) -> None:
    """Anthropic continues the last turn if it is the assistant's, and refuses one that ends in white space."""
    block = turns[-1].blocks[-1]
    if block["type"] == "text":
        block["text"] = block["text"].rstrip()
