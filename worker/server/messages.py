"""A chat's messages, checked and brought to the form that chat templates expect.

Templates get what ``transformers`` would give them: content as one text, the arguments of tool calls as objects.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from worker.protocol.errors import ApiError, bad_request
from worker.server.body import shown

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises ApiError (400) that names the message."""
    if not messages:
        raise bad_request("'messages' is empty. Send at least one message.", param="messages", code="empty_array")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(
            f"'{where}.role' is {shown(role)}. It must be one of: {', '.join(_ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    if message.get("function_call"):
        raise bad_request(
            f"'{where}.function_call' is the old form. Send 'tool_calls'.",
            param=f"{where}.function_call",
            code="unsupported_parameter",
        )
    read: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, f"{where}.content")}
    names = ["name"]
    if role == "assistant":
        names.append("reasoning_content")
        if message.get("tool_calls") not in (None, []):
            read["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    elif message.get("tool_calls"):
        raise bad_request(
            f"'{where}' is of role {role!r}: only the assistant calls tools.",
            param=f"{where}.tool_calls",
            code="invalid_value",
        )
    if role == "tool":
        names.append("tool_call_id")
    for name in names:
        value = message.get(name)
        if value is not None:
            read[name] = _text(value, f"{where}.{name}")
    return read


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{where!r} must be text.", param=where, code="invalid_type")
    return value


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{where}[{at}]") for at, part in enumerate(content))
    raise bad_request(
        f"{where!r} must be text or a list of text parts.",
        param=where,
        code="missing_required_parameter" if content is None else "invalid_type",
    )


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(kind, str) and kind != "text":
        raise bad_request(
            f"{where!r} is of type {shown(kind)}, but this model reads text alone.",
            param=where,
            code="unsupported_content_type",
        )
    raise bad_request(f'{where!r} must be {{"type": "text", "text": "..."}}.', param=where, code="invalid_type")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{where!r} must be a list.", param=where, code="invalid_type")
    return [_tool_call(call, f"{where}[{at}]") for at, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise bad_request(
            f'{where!r} must be {{"id": "...", "type": "function", "function": {{"name": ..., "arguments": ...}}}}.',
            param=where,
            code="invalid_type",
        )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _missing(f"{where}.function.name")
    arguments = _arguments(function.get("arguments", ""), f"{where}.function.arguments")
    read = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return read if call.get("id") is None else {"id": _text(call["id"], f"{where}.id")} | read


def _arguments(arguments: Any, where: str) -> Any:
    """Arguments as an object. What a model wrote that is no JSON object stays the text that it is."""
    if isinstance(arguments, dict):
        return arguments
    text = _text(arguments, where)
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _missing(where: str) -> ApiError:
    return bad_request(f"The field {where!r} is missing.", param=where, code="missing_required_parameter")
