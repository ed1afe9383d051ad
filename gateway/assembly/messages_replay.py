"""A whole message as the events of a stream.

Reference: https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gateway.assembly.pieces import pieces
from gateway.backends.lenient_json import encoded

_OF_END: Final = ("stop_reason", "stop_sequence", "stop_details", "container")
"""What of a message is told behind its content."""
_BESIDE: Final = "context_management"
_CALLS: Final = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))
"""Blocks whose input is told piece by piece."""


def message_events(message: dict[str, Any]) -> list[bytes]:
    content, usage = message.get("content"), message.get("usage")
    start = {name: None if name in _OF_END else value for name, value in message.items() if name != _BESIDE}
    start |= {"content": [], "stop_reason": None, "stop_sequence": None}
    if isinstance(usage, dict):
        start["usage"] = usage | {"output_tokens": 0}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, dict):
            empty, deltas = _told(block)
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": None, "stop_sequence": None}
    end |= {name: message[name] for name in _OF_END if name in message}
    ending: dict[str, Any] = {"type": "message_delta", "delta": end}
    if isinstance(usage, dict):
        ending["usage"] = usage
    if _BESIDE in message:
        ending[_BESIDE] = message[_BESIDE]
    return [encoded(event) for event in (*events, ending, {"type": "message_stop"})]


def _told(block: dict[str, Any]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        citations = block.get("citations")
        begin = block | {"text": ""} | ({"citations": []} if citations else {})
        return begin, _text(block["text"], citations if isinstance(citations, list) else [])
    if kind == "thinking" and isinstance(block.get("thinking"), str):
        begin = block | {"thinking": ""} | ({"signature": ""} if "signature" in block else {})
        return begin, _thinking(block["thinking"], block.get("signature"))
    if kind in _CALLS and isinstance(block.get("input"), dict):
        return block | {"input": {}}, _input(block["input"])
    return block, iter(())


def _text(text: str, citations: list[Any]) -> Iterator[dict[str, Any]]:
    for piece in pieces(text):
        yield {"type": "text_delta", "text": piece}
    for citation in citations:
        yield {"type": "citations_delta", "citation": citation}


def _thinking(thought: str, signature: Any) -> Iterator[dict[str, Any]]:
    for piece in pieces(thought):
        yield {"type": "thinking_delta", "thinking": piece}
    if signature:
        yield {"type": "signature_delta", "signature": signature}


def _input(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "input_json_delta", "partial_json": ""}
    for piece in pieces(encoded(given).decode()) if given else ():
        yield {"type": "input_json_delta", "partial_json": piece}
