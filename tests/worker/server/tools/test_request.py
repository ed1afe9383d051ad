"""What a request says of tools, checked, and what it means for the answer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from worker.protocol.errors import ApiError
from worker.server.tools import CallArguments, CallStart, Text, ToolUse, read_tools, tool_format_of


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


WEATHER = tool("get_weather", description="Of a city.", parameters={"type": "object", "properties": {"city": {}}})
TIME = tool("get_time")
HERMES = tool_format_of("")


def names(use: ToolUse) -> list[str]:
    return [one.name for one in use.callable]


@pytest.mark.parametrize(
    ("tools", "choice", "mode", "callable"),
    [
        (None, None, "none", []),
        ([], None, "none", []),
        (None, "none", "none", []),
        ([], "auto", "none", []),
        ([WEATHER, TIME], None, "auto", ["get_weather", "get_time"]),
        ([WEATHER, TIME], "auto", "auto", ["get_weather", "get_time"]),
        ([WEATHER, TIME], "none", "none", []),
        ([WEATHER, TIME], "required", "required", ["get_weather", "get_time"]),
        ([WEATHER, TIME], tool("get_time"), "required", ["get_time"]),
        (
            [WEATHER, TIME],
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("get_time")]}},
            "auto",
            ["get_time"],
        ),
    ],
)
def test_choices(tools: Any, choice: Any, mode: str, callable: list[str]) -> None:
    use = read_tools(tools, choice)
    assert use.mode == mode
    assert names(use) == callable
    assert (use.for_template is None) == (mode == "none")
    assert (use.parser(HERMES) is None) == (mode == "none")
    assert (use.grammar(HERMES) is None) == (mode != "required")


def test_the_template_gets_the_tools_as_they_were_sent() -> None:
    assert read_tools([WEATHER, TIME], tool("get_time")).for_template == [WEATHER, TIME]


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    assert read_tools([TIME]).tools[0].parameters == {"type": "object", "properties": {}, "additionalProperties": False}


def test_reading_leaves_the_request_as_it_is() -> None:
    given = tool("f", parameters={"properties": {}})
    read_tools([given])
    assert given == tool("f", parameters={"properties": {}})


def test_a_named_tool_is_called_once() -> None:
    assert read_tools([WEATHER], None).parallel
    assert not read_tools([WEATHER], None, False).parallel
    assert not read_tools([WEATHER], tool("get_weather")).parallel


def test_without_parallel_calls_only_the_first_is_given() -> None:
    numbers = itertools.count()
    parser = read_tools([WEATHER, TIME], "auto", False).parser(HERMES, lambda: f"call_{next(numbers)}")
    assert parser is not None
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    assert [*parser.push(f"a {call}{call} b"), *parser.finish()] == [
        Text("a "),
        CallStart(0, "call_0", "get_time"),
        CallArguments(0, "{}"),
        Text(" b"),
    ]


def test_a_tool_that_may_not_be_called_is_not() -> None:
    parser = read_tools([WEATHER, TIME], tool("get_time")).parser(HERMES)
    assert parser is not None
    text = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    assert [*parser.push(text), *parser.finish()] == [Text(text)]


def test_ids_differ_and_look_like_openais() -> None:
    parser = read_tools([TIME]).parser(HERMES)
    assert parser is not None
    pieces = parser.push('<tool_call>{"name": "get_time", "arguments": {}}</tool_call>' * 20)
    ids = {piece.id for piece in pieces if isinstance(piece, CallStart)}
    assert len(ids) == 20
    assert all(one.startswith("call_") and len(one) == 29 for one in ids)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (({},), "tools"),
        ((["get_time"],), "tools[0]"),
        (([{"type": "web_search"}],), "tools[0].type"),
        (([{"type": "function"}],), "tools[0].function"),
        (([tool("")],), "tools[0].function.name"),
        (([{"type": "function", "function": {}}],), "tools[0].function.name"),
        (([tool("a b")],), "tools[0].function.name"),
        (([tool("n" * 65)],), "tools[0].function.name"),
        (([TIME, TIME],), "tools[1].function.name"),
        (([tool("f", description=1)],), "tools[0].function.description"),
        (([tool("f", strict=1)],), "tools[0].function.strict"),
        (([tool("f", parameters=[])],), "tools[0].function.parameters"),
        (([tool("f", parameters={"type": "array"})],), "tools[0].function.parameters.type"),
        (([tool(f"f{at}") for at in range(129)],), "tools"),
        ((None, "required"), "tool_choice"),
        (([], "required"), "tool_choice"),
        (([TIME], "any"), "tool_choice"),
        (([TIME], 1), "tool_choice"),
        (([TIME], {"type": "function"}), "tool_choice.function.name"),
        (([TIME], tool("get_weather")), "tool_choice.function.name"),
        ((None, tool("get_weather")), "tool_choice.function.name"),
        (([TIME], {"type": "allowed_tools"}), "tool_choice.allowed_tools"),
        (
            ([TIME], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("f")]}}),
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        (([TIME], "auto", "yes"), "parallel_tool_calls"),
    ],
)
def test_a_refusal_names_the_field(arguments: tuple[Any, ...], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_tools(*arguments)
    assert caught.value.status == 400
    assert caught.value.body.param == param


def test_a_schema_that_no_grammar_can_hold_is_refused_only_where_it_must_be_held() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert read_tools([tool("f", parameters=odd, strict=True)], "auto").grammar(HERMES) is None
    assert read_tools([tool("f", parameters=odd)], "required").grammar(HERMES) is not None
    with pytest.raises(ApiError) as caught:
        read_tools([TIME, tool("f", parameters=odd, strict=True)], "required").grammar(HERMES)
    assert caught.value.body.param == "tools[1].function.parameters"
    assert "uniqueItems" in caught.value.body.message


def test_tools_that_are_too_large_together_are_refused() -> None:
    large = {"type": "object", "properties": {"a": {"enum": [f"{at:0200}" for at in range(100)]}}}
    with pytest.raises(ApiError) as caught:
        read_tools([tool(f"f{at}", parameters=large) for at in range(10)], "required").grammar(HERMES)
    assert caught.value.body.param == "tools"
