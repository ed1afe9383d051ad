"""What api.anthropic.com sends: whole, streamed, and when it refuses.

Events are named, and their data's ``type`` says the same. ``message_start`` holds the message without its content, and
``usage`` with the input's tokens and the few of the output that are there; a ``ping`` follows the first block's start;
``message_delta`` tells the stop reason and the running total of the output, newer models all of ``usage`` once more;
``message_stop`` ends it, without ``[DONE]``. Errors have ``type: error`` and a ``request_id``; in a stream they come as
an event, often behind ``message_start``. 529 is for overloads, ``retry-after`` comes with a 429.

References: https://platform.claude.com/docs/en/build-with-claude/streaming,
https://platform.claude.com/docs/en/api/errors, and the types of Anthropic's SDK for what it takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from anthropic import types

from tests.gateway.conftest import Conversation

KEY = "sk-ant-api03-of-the-tests"
REQUEST_ID = "req_018EeWyXxfu5pfWkrYcMdjWG"
USAGE = {
    "input_tokens": 12,
    "cache_creation_input_tokens": 7,
    "cache_read_input_tokens": 100,
    "cache_creation": {"ephemeral_5m_input_tokens": 7, "ephemeral_1h_input_tokens": 0},
    "output_tokens": 30,
    "output_tokens_details": {"thinking_tokens": 9},
    "service_tier": "standard",
}
TEXT = {"type": "text", "text": 'Grüße, 世界! 🦜 "model" \u2028 fin'}
TOOL = {"type": "tool_use", "id": "toolu_01A", "name": "get_weather", "input": {"city": "Zürich", "days": 1.0}}
BARE_TOOL = {"type": "tool_use", "id": "toolu_01B", "name": "now", "input": {}}
THINKING = {"type": "thinking", "thinking": "Let me see. 12 is even.", "signature": "EqoBCkgIARABGAIiQL8"}
REDACTED = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"}


def message(*content: dict[str, Any], stop_reason: str = "end_turn", **more: Any) -> dict[str, Any]:
    return {
        "model": "claude-sonnet-4-6",
        "id": "msg_01XFDUDYJgAACzvnptvVoYEL",
        "type": "message",
        "role": "assistant",
        "content": list(content),
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": USAGE,
    } | more


def error(kind: str, text: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": REQUEST_ID}


def encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def events_of(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """The stream that says the same."""
    begun = {name: whole["usage"].get(name) for name in whole["usage"] if name != "output_tokens_details"}
    start = whole | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": begun | {"output_tokens": 1}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(whole["content"]):
        empty, deltas = _pieces(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        if index == 0:
            events.append({"type": "ping"})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    if "stop_details" in whole:
        ending["stop_details"] = whole["stop_details"]
    events.append({"type": "message_delta", "delta": ending, "usage": whole["usage"]})
    events.append({"type": "message_stop"})
    return events


def on_the_wire(*events: dict[str, Any]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoded(event)) for event in events)


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it starts, and what is added to it."""
    match block["type"]:
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": piece} for piece in _cut(block["text"])]
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in _cut(block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
            return block | {"thinking": "", "signature": ""}, deltas
        case "tool_use":
            written = json.dumps(block["input"], ensure_ascii=False) if block["input"] else ""
            pieces = ["", *_cut(written)]
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
    return block, []


def _cut(text: str) -> list[str]:
    return [text[at : at + 5] for at in range(0, len(text), 5)]


@dataclass
class Anthropic:
    """A script for the tests' backend: refuses what Anthropic would refuse, else says ``says``."""

    says: dict[str, Any] = field(default_factory=lambda: message(TEXT))
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, c: Conversation) -> None:
        if c.head.startswith("GET /v1/models"):
            await c.status(200, b'{"data":[{"type":"model","id":"claude-sonnet-4-6"}],"has_more":false}')
            return
        assert c.head.startswith("POST /v1/messages ")
        self.bodies.append(c.body)
        if c.headers.get("x-api-key") != KEY:
            await refuse(c, 401, "authentication_error", "invalid x-api-key")
        elif (wrong := problem(c.body, c.headers)) is not None:
            await refuse(c, 400, "invalid_request_error", wrong)
        elif c.body.get("stream"):
            await c.begin()
            for event in events_of(self.says):
                await c.send_piece(on_the_wire(event))
            await c.send(b"0\r\n\r\n")
        else:
            await c.status(200, encoded(self.says), more=f"request-id: {REQUEST_ID}\r\n")


async def refuse(c: Conversation, status: int, kind: str, text: str, *, more: str = "") -> None:
    await c.status(status, encoded(error(kind, text)), more=f"request-id: {REQUEST_ID}\r\n{more}")


def problem(request: dict[str, Any], headers: dict[str, str] | None = None) -> str | None:
    """Why Anthropic would refuse it, if it would; in its words, more or less."""
    if headers is not None and headers.get("anthropic-version") != "2023-06-01":
        return "anthropic-version: header is required"
    return next(_problems(request), None)


def _problems(request: dict[str, Any]) -> Iterator[str]:
    # What only older models take is not in the SDK's types any more.
    sampling = ("temperature", "top_p", "top_k")
    asked = {name: value for name, value in request.items() if name not in sampling}
    yield from _fields("", asked, types.message_create_params.MessageCreateParamsStreaming)
    yield from (f"{name}: Field required" for name in ("model", "messages", "max_tokens") if name not in request)
    if not request.get("messages"):
        yield "messages: at least one message is required"
    if request.get("max_tokens", 1) < 1:
        yield "max_tokens: must be greater than or equal to 1"
    if not 0 <= request.get("temperature", 1) <= 1:
        yield "temperature: range: 0..1"
    for at, block in enumerate(request.get("system", [])):
        yield from _block(f"system.{at}", block, {"text"})
    role = None
    calls: set[str] = set()
    for at, turn in enumerate(request.get("messages", [])):
        where = f"messages.{at}"
        if turn["role"] == role:
            yield f"{where}: roles must alternate"
        role = turn["role"]
        yield from _turn(where, turn, calls)
        calls = {block["id"] for block in turn["content"] if block["type"] == "tool_use"}
    for at, stop in enumerate(request.get("stop_sequences", [])):
        if not stop.strip():
            yield f"stop_sequences.{at}: each stop sequence must contain non-whitespace"
    yield from _tools(request)
    thinking = request.get("thinking", {})
    if thinking.get("type") == "enabled" and not 1024 <= thinking["budget_tokens"] < request["max_tokens"]:
        yield "thinking.budget_tokens: must be at least 1024 and less than max_tokens"
    if thinking.get("type") in ("enabled", "adaptive"):
        if request.get("tool_choice", {}).get("type") in ("any", "tool"):
            yield "Thinking may not be enabled when tool_choice forces tool use."
        if "temperature" in request:
            yield "`temperature` may only be set to 1 when thinking is enabled."


def _turn(where: str, turn: dict[str, Any], calls: set[str]) -> Iterator[str]:
    if not turn["content"]:
        yield f"{where}: content must be non-empty"
    kinds = {"user": {"text", "image", "document", "tool_result"}, "assistant": {"text", "tool_use"}}[turn["role"]]
    results: set[str] = set()
    for at, block in enumerate(turn["content"]):
        yield from _block(f"{where}.content.{at}", block, kinds)
        if block["type"] == "tool_result":
            if len(results) < at:
                yield f"{where}: tool_result blocks must come first"
            results.add(block["tool_use_id"])
    if results != calls and turn["role"] == "user":
        yield f"{where}: `tool_use` ids were found without `tool_result` blocks immediately after, or the reverse"


_SHAPES: dict[str, Any] = {
    "text": types.TextBlockParam,
    "image": types.ImageBlockParam,
    "document": types.DocumentBlockParam,
    "tool_use": types.ToolUseBlockParam,
    "tool_result": types.ToolResultBlockParam,
    "base64": types.Base64ImageSourceParam,
    "url": types.URLImageSourceParam,
}


def _block(where: str, block: dict[str, Any], kinds: set[str]) -> Iterator[str]:
    if block.get("type") not in kinds:
        yield f"{where}.type: {block.get('type')} is not permitted here"
        return
    yield from _fields(where, block, _SHAPES[block["type"]])
    if block["type"] == "text" and not block["text"].strip():
        yield f"{where}: text content blocks must contain non-whitespace text"
    if block["type"] == "image":
        yield from _fields(f"{where}.source", block["source"], _SHAPES[block["source"]["type"]])
    if block["type"] == "tool_use" and not isinstance(block["input"], dict):
        yield f"{where}.input: Input should be a valid dictionary"
    for id in (block.get("id"), block.get("tool_use_id")):
        if id is not None and not re.fullmatch("[a-zA-Z0-9_-]+", id):
            yield f"{where}: id should match pattern '^[a-zA-Z0-9_-]+$'"
    for at, inner in enumerate(block["content"] if block["type"] == "tool_result" and "content" in block else []):
        yield from _block(f"{where}.content.{at}", inner, {"text", "image", "document"})


def _tools(request: dict[str, Any]) -> Iterator[str]:
    names = []
    for at, tool in enumerate(request.get("tools", [])):
        yield from _fields(f"tools.{at}", tool, types.ToolParam)
        names.append(tool["name"])
        if "type" not in tool["input_schema"]:
            yield f"tools.{at}.input_schema.type: Field required"
    choice = request.get("tool_choice")
    if choice is None:
        return
    if not names:
        yield "tool_choice may only be specified while providing tools."
    shapes = {
        "auto": types.ToolChoiceAutoParam,
        "any": types.ToolChoiceAnyParam,
        "tool": types.ToolChoiceToolParam,
        "none": types.ToolChoiceNoneParam,
    }
    yield from _fields("tool_choice", choice, shapes[choice["type"]])


def _fields(where: str, given: dict[str, Any], shape: Any) -> Iterator[str]:
    known = shape.__required_keys__ | shape.__optional_keys__
    yield from (f"{where}.{name}: Extra inputs are not permitted" for name in given if name not in known)
