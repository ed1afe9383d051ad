"""Which tools a request offers, and which of them the answer may or must call.

Reference: https://platform.openai.com/docs/guides/function-calling
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from worker.engine.grammar import check_grammar
from worker.engine.messages import Grammar
from worker.protocol.errors import bad_request
from worker.server.structured import check_size, compact_schema, json_schema_grammar
from worker.server.tools.formats import ToolFormat
from worker.server.tools.pieces import CallArguments, CallStart, Piece, ToolCallParser, new_call_id

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. ``parameters``: the JSON schema of its arguments' object."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool
    field: str
    """Where it stands in the request, for messages."""
    given: Mapping[str, Any]
    """As the request has it: what a chat template is given."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's tools. ``mode``: whether the answer may call (auto), must (required) or must not (none)."""

    tools: Sequence[Tool] = ()
    mode: Mode = "none"
    callable: Sequence[Tool] = ()
    """Those of the tools that may be called."""
    parallel: bool = True
    """Whether there may be several calls."""

    @property
    def for_template(self) -> list[Mapping[str, Any]] | None:
        """The tools as a chat template takes them; None if the answer must not call any."""
        return [tool.given for tool in self.tools] if self.mode != "none" else None

    def grammar(self, format: ToolFormat) -> Grammar | None:
        """What forces calls in the model's format, of tools that may be called, with arguments as their schemas say.

        None unless a call is required. Raises ApiError (400) that names the tool whose schema can't be followed.
        Keywords that no grammar can hold are ignored, unless the tool is ``strict``.
        """
        if self.mode != "required":
            return None
        tools = []
        for tool in self.callable:
            field = f"{tool.field}.function.parameters"
            json_schema_grammar(tool.parameters, field, strict=tool.strict)
            tools.append((tool.name, compact_schema(tool.parameters, field, lenient=not tool.strict)))
        grammar = Grammar("lark", format.forced(tools, parallel=self.parallel))
        check_size(grammar.text, "tools")
        if fault := check_grammar(grammar):
            raise bad_request(
                f"The tools' parameters can't be followed together: {fault.rstrip('.')}. Send fewer or simpler tools.",
                param="tools",
                code="invalid_value",
            )
        return grammar

    def parser(self, format: ToolFormat, new_id: Callable[[], str] = new_call_id) -> ToolCallParser | None:
        """What finds the calls in one answer; None if there are to be none."""
        if self.mode == "none":
            return None
        parser = format.parser(frozenset(tool.name for tool in self.callable), new_id)
        return parser if self.parallel else _FirstCall(parser)


class _FirstCall:
    """Leaves out all calls but the first, for clients that handle no more than one."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Piece]:
        return self._kept(self._parser.push(text))

    def finish(self) -> list[Piece]:
        return self._kept(self._parser.finish())

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if not (isinstance(piece, CallStart | CallArguments) and piece.index > 0)]


def read_tools(tools: Any = None, tool_choice: Any = None, parallel_tool_calls: Any = None) -> ToolUse:
    """Check a request's fields. Raises ApiError (400) that names the one that is wrong."""
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise bad_request(
            "'parallel_tool_calls' must be true or false.", param="parallel_tool_calls", code="invalid_type"
        )
    parallel = parallel_tool_calls is not False
    found = _read_list(tools)
    if tool_choice is None:
        tool_choice = "auto" if found else "none"
    if tool_choice == "none" or (tool_choice == "auto" and not found):
        return ToolUse(found, "none", (), parallel)
    if tool_choice == "auto":
        return ToolUse(found, "auto", found, parallel)
    if tool_choice == "required":
        if not found:
            raise _without_tools("'tool_choice' is 'required', but there are no 'tools'. Send some.")
        return ToolUse(found, "required", found, parallel)
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "function":
        return ToolUse(found, "required", [_named(tool_choice, found, "tool_choice")], parallel=False)
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "allowed_tools":
        return _allowed(tool_choice.get("allowed_tools"), found, parallel)
    raise bad_request(
        "'tool_choice' must be 'none', 'auto', 'required', or "
        '{"type": "function", "function": {"name": "..."}}.',
        param="tool_choice",
        code="invalid_value",
    )


def _read_list(tools: Any) -> list[Tool]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_request("'tools' must be a list.", param="tools", code="invalid_type")
    if len(tools) > MAX_TOOLS:
        raise bad_request(
            f"'tools' has {len(tools)} entries. At most {MAX_TOOLS} are allowed.", param="tools", code="invalid_value"
        )
    found: dict[str, Tool] = {}
    for at, given in enumerate(tools):
        tool = _read_tool(given, f"tools[{at}]")
        if tool.name in found:
            raise bad_request(
                f"Two tools are named {tool.name!r}. Give each a name of its own.",
                param=f"tools[{at}].function.name",
                code="invalid_value",
            )
        found[tool.name] = tool
    return list(found.values())


def _read_tool(given: Any, field: str) -> Tool:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise bad_request(
            f'{field!r} must be {{"type": "function", "function": {{...}}}}: other kinds of tools are not supported.',
            param=f"{field}.type" if isinstance(given, dict) else field,
            code="invalid_value",
        )
    function = given.get("function")
    if not isinstance(function, dict):
        raise bad_request(
            f"'{field}.function' must be an object.", param=f"{field}.function", code="missing_required_parameter"
        )
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    field = f"{field}.function"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"'{field}.name' must be 1 to 64 letters, digits, '_', '-' or '.'.",
            param=f"{field}.name",
            code="missing_required_parameter" if name is None else "invalid_value",
        )
    if description is not None and not isinstance(description, str):
        raise bad_request(f"'{field}.description' must be text.", param=f"{field}.description", code="invalid_type")
    if strict is not None and not isinstance(strict, bool):
        raise bad_request(f"'{field}.strict' must be true or false.", param=f"{field}.strict", code="invalid_type")
    if parameters is None:
        parameters = _NO_ARGUMENTS
    elif not isinstance(parameters, dict):
        raise bad_request(
            f"'{field}.parameters' must be a JSON schema: an object.",
            param=f"{field}.parameters",
            code="invalid_type",
        )
    elif parameters.get("type", "object") != "object":
        raise bad_request(
            f"'{field}.parameters' must describe an object: its 'type' must be 'object'.",
            param=f"{field}.parameters.type",
            code="invalid_value",
        )
    parameters = {**parameters, "type": "object"}
    return Tool(name, description or "", parameters, bool(strict), field.removesuffix(".function"), given)


def _named(choice: Any, tools: Sequence[Tool], field: str) -> Tool:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request(
            f"'{field}.function.name' is missing.", param=f"{field}.function.name", code="missing_required_parameter"
        )
    for tool in tools:
        if tool.name == name:
            return tool
    raise bad_request(
        f"'{field}' names the tool {name!r}, which is none of the 'tools'.",
        param=f"{field}.function.name",
        code="invalid_value",
    )


def _allowed(allowed: Any, tools: Sequence[Tool], parallel: bool) -> ToolUse:
    field = "tool_choice.allowed_tools"
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    choices = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(choices, list) or not choices:
        raise bad_request(
            f'{field!r} must be {{"mode": "auto" or "required", "tools": [...]}}.', param=field, code="invalid_value"
        )
    found = {tool.name: tool for at, one in enumerate(choices) for tool in [_named(one, tools, f"{field}.tools[{at}]")]}
    return ToolUse(tools, mode, list(found.values()), parallel)


def _without_tools(message: str) -> Exception:
    return bad_request(message, param="tool_choice", code="invalid_value")
