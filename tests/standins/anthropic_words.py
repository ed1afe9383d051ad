"""What Anthropic says: a message whole, and the events of a stream that say the same.

Reference: https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

import json
from typing import Any

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
