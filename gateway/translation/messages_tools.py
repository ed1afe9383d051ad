"""Tools of a chat completion, and how they may be called, in the words of Anthropic's Messages API.

Reference: https://platform.claude.com/docs/en/agents-and-tools/tool-use/overview
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.ask import Body, given
from gateway.translation.chat_fields import ANYTHING, ITEMS, NULL, OBJECT, is_null, read
from worker.protocol.errors import ApiError, bad_request


class _Tool(msgspec.Struct):
    type: str = "function"
    function: msgspec.Raw = NULL
    cache_control: msgspec.Raw = NULL


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None
    cache_control: msgspec.Raw = NULL


_TOOL = msgspec.json.Decoder(_Tool)
_FUNCTION = msgspec.json.Decoder(_Function)


def tools(chat: Body) -> dict[str, Any]:
    """``tools`` and ``tool_choice``, where there are any. Raises ApiError (400)."""
    if not given(chat, "tools") and given(chat, "functions"):
        items = read(chat["functions"], ITEMS, "functions")
        found = [_described(item, f"functions[{at}]", NULL) for at, item in enumerate(items)]
        # Such a client knows of one call in an answer.
        choice: dict[str, Any] | None = _legacy_choice(chat) | {"disable_parallel_tool_use": True}
    else:
        items = read(chat["tools"], ITEMS, "tools") if given(chat, "tools") else []
        found = [_tool(item, f"tools[{at}]") for at, item in enumerate(items)]
        choice, allowed = _choice(chat)
        if allowed is not None:
            found = [tool for tool in found if tool["name"] in allowed]
        if _value(chat, "parallel_tool_calls") is False and (choice or {}).get("type") != "none":
            choice = (choice or {"type": "auto"}) | {"disable_parallel_tool_use": True}
    if not found:
        if choice is not None and choice["type"] in ("any", "tool"):
            raise bad_request("'tool_choice' asks for a call, but no tool is given in 'tools'.", param="tool_choice")
        return {}
    if choice is None:
        return {"tools": found}
    if choice["type"] == "none":
        choice.pop("disable_parallel_tool_use", None)
    return {"tools": found, "tool_choice": choice}


def _tool(item: msgspec.Raw, where: str) -> dict[str, Any]:
    tool = read(item, _TOOL, where)
    if tool.type != "function" or is_null(tool.function):
        raise bad_request(
            f"This model takes tools of type 'function' only, and '{where}' is of another. Describe it as a function.",
            param=where,
        )
    return _described(tool.function, f"{where}.function", tool.cache_control)


def _described(function: msgspec.Raw, where: str, cache_control: msgspec.Raw) -> dict[str, Any]:
    described = read(function, _FUNCTION, where)
    tool: dict[str, Any] = {"name": described.name}
    if described.description:
        tool["description"] = described.description
    tool["input_schema"] = _schema(described.parameters, f"{where}.parameters")
    if described.strict:
        tool["strict"] = True
    for control in (described.cache_control, cache_control):
        if not is_null(control):
            tool["cache_control"] = control
    return tool


def _schema(parameters: msgspec.Raw, where: str) -> Any:
    """As it is, but that it must be told to be an object's."""
    if is_null(parameters):
        return {"type": "object", "properties": {}}
    schema = read(parameters, OBJECT, where)
    return parameters if "type" in schema else {"type": "object"} | schema


def _choice(chat: Body) -> tuple[dict[str, Any] | None, set[str] | None]:
    """``tool_choice``, and the names of the tools that may be called if not all of them."""
    choice = _value(chat, "tool_choice")
    if choice is None:
        return None, None
    if isinstance(choice, str):
        kind = {"auto": "auto", "required": "any", "none": "none"}.get(choice)
        if kind is None:
            raise _bad_choice()
        return {"type": kind}, None
    if not isinstance(choice, dict):
        raise _bad_choice()
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
            raise _bad_choice()
        names = {name for tool in allowed["tools"] if (name := _named(tool)) is not None}
        return {"type": "any" if allowed.get("mode") == "required" else "auto"}, names
    name = _named(choice)
    if name is None:
        raise _bad_choice()
    return {"type": "tool", "name": name}, None


def _legacy_choice(chat: Body) -> dict[str, Any]:
    choice = _value(chat, "function_call")
    if choice is None or choice == "auto":
        return {"type": "auto"}
    if choice == "none":
        return {"type": "none"}
    if isinstance(choice, dict) and isinstance(choice.get("name"), str):
        return {"type": "tool", "name": choice["name"]}
    raise bad_request("'function_call' must be 'auto', 'none' or {'name': ...}.", param="function_call")


def _named(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _bad_choice() -> ApiError:
    return bad_request(
        "'tool_choice' must be 'auto', 'none', 'required', a function by its name, or 'allowed_tools'.",
        param="tool_choice",
    )


def _value(chat: Body, field: str) -> Any:
    return read(chat[field], ANYTHING, field) if given(chat, field) else None
