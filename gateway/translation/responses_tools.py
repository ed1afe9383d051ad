"""Tools and formats of a Responses request, in the words of chat completions: the one is flat, the other nests.

Reference: https://developers.openai.com/api/reference/resources/responses/methods/create
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.ask import Body
from gateway.translation.responses_fields import NULL, encoded, read, unsupported
from worker.protocol.errors import bad_request

MODES: Final = ("none", "auto", "required")


class _Tool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None


class _Named(msgspec.Struct):
    type: str
    name: str = ""


class _Choice(msgspec.Struct):
    type: str
    name: str = ""
    mode: str = "auto"
    tools: list[_Named] = []


class _Format(msgspec.Struct):
    type: str
    name: str = ""
    schema: msgspec.Raw = NULL
    description: str | None = None
    strict: bool | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None
    verbosity: str | None = None


def put_tools(chat: Body, tools: msgspec.Raw, choice: msgspec.Raw) -> None:
    """Write both into the chat completion. Raises ApiError (400)."""
    given: list[_Tool] = read(tools, list[_Tool], "tools", "a list of tools, each with a 'type'") or []
    for index, tool in enumerate(given):
        if tool.type != "function":
            raise unsupported(
                f"The tool type {tool.type[:64]!r}",
                "Only tools of the type 'function', which you run yourself, are served; leave the others out.",
                f"tools[{index}].type",
            )
        if not tool.name:
            raise bad_request(f"'tools[{index}].name' must be the function's name.", param=f"tools[{index}].name")
    chosen = read(choice, str | _Choice, "tool_choice", "'none', 'auto', 'required', or an object with a 'type'")
    if isinstance(chosen, _Choice) and chosen.type == "allowed_tools":
        # Chat completions of most servers know no such choice: the others are not even shown.
        allowed = {each.name for each in chosen.tools if each.type == "function"}
        given = [tool for tool in given if tool.name in allowed]
        if not given:
            raise bad_request("'tool_choice.tools' names none of 'tools'.", param="tool_choice.tools")
        chosen = chosen.mode
    if given:
        chat["tools"] = encoded([_nested(tool) for tool in given])
    if isinstance(chosen, str):
        if chosen not in MODES:
            raise bad_request(
                f"'tool_choice' must be one of {', '.join(map(repr, MODES))}, or an object.", param="tool_choice"
            )
        if given:  # without tools, servers take a choice for a fault
            chat["tool_choice"] = encoded(chosen)
    elif chosen is not None:
        if chosen.type != "function":
            raise unsupported(
                f"The tool choice {chosen.type[:64]!r}",
                "Choose a function, or 'none', 'auto', 'required'.",
                "tool_choice.type",
            )
        if chosen.name not in {tool.name for tool in given}:
            raise bad_request("'tool_choice.name' must name one of 'tools'.", param="tool_choice.name")
        chat["tool_choice"] = encoded({"type": "function", "function": {"name": chosen.name}})


def put_text(chat: Body, text: msgspec.Raw) -> None:
    """Format and verbosity. Raises ApiError (400)."""
    given: _Text | None = read(text, _Text, "text", "an object with 'format' or 'verbosity'")
    if given is None:
        return
    if given.verbosity is not None:
        chat["verbosity"] = encoded(given.verbosity)
    wanted = given.format
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_object":
        chat["response_format"] = encoded({"type": "json_object"})
    elif wanted.type == "json_schema":
        if not wanted.name or wanted.schema == NULL:
            raise bad_request("'text.format' must have a 'name' and a 'schema'.", param="text.format")
        chat["response_format"] = encoded({"type": "json_schema", "json_schema": _without_none(wanted, "type")})
    else:
        raise unsupported(
            f"The format {wanted.type[:64]!r}", "Use 'text', 'json_object' or 'json_schema'.", "text.format.type"
        )


def _nested(tool: _Tool) -> dict[str, Any]:
    return {"type": "function", "function": _without_none(tool, "type")}


def _without_none(struct: msgspec.Struct, *left_out: str) -> dict[str, Any]:
    found = msgspec.structs.asdict(struct)
    return {
        name: value for name, value in found.items() if name not in left_out and value is not None and value != NULL
    }
