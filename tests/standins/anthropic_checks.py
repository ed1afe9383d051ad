"""What Anthropic takes: the fields are those of its SDK's types, the rules those of its documentation.

References: https://platform.claude.com/docs/en/api/messages,
https://platform.claude.com/docs/en/agents-and-tools/tool-use/handle-tool-calls,
https://platform.claude.com/docs/en/build-with-claude/extended-thinking
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from anthropic import types


def problem(request: dict[str, Any]) -> str | None:
    """Why Anthropic would refuse it, if it would; in its words, more or less."""
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
    for at, block in enumerate(_blocks(request.get("system", []))):
        yield from _block(f"system.{at}", block, {"text"})
    role = None
    calls: set[str] = set()
    for at, turn in enumerate(request.get("messages", [])):
        where = f"messages.{at}"
        if turn["role"] == role:
            yield f"{where}: roles must alternate"
        role = turn["role"]
        yield from _turn(where, turn, calls)
        calls = {block["id"] for block in _blocks(turn["content"]) if block["type"] == "tool_use"}
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
    for at, block in enumerate(_blocks(turn["content"])):
        yield from _block(f"{where}.content.{at}", block, kinds)
        if block["type"] == "tool_result":
            if len(results) < at:
                yield f"{where}: tool_result blocks must come first"
            results.add(block["tool_use_id"])
    if results != calls and turn["role"] == "user":
        yield f"{where}: `tool_use` ids were found without `tool_result` blocks immediately after, or the reverse"


def _blocks(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


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
    for at, inner in enumerate(_blocks(block.get("content", [])) if block["type"] == "tool_result" else []):
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
