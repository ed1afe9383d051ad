"""Which format a chat template belongs to, and forced calls: they can't but be calls, with arguments that fit."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.worker.grammar_sampling import write
from tests.worker.server.tools.reading import calls_of, text_of
from worker.server.tools import FORMAT_NAMES, read_tools, tool_format_of

LLAMA = (
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{ \'\\n<tool_call>\\n{"name": "\' }}', "hermes"),
        (LLAMA, "llama3"),
        ("{%- if builtin_tools %}{{ '<|python_tag|>' }}", "llama3"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("{{ messages }}", "hermes"),
        ("", "hermes"),
    ],
)
def test_the_format_is_guessed_from_the_template(template: str, name: str) -> None:
    assert tool_format_of(template).name == name


def test_a_name_decides_over_the_template() -> None:
    assert tool_format_of(LLAMA, "mistral").name == "mistral"
    assert tool_format_of("", "llama3_json").name == "llama3"
    assert tool_format_of("", "qwen").name == "hermes"
    with pytest.raises(ValueError, match="hermes, llama3, mistral"):
        tool_format_of("", "cobol")


SCHEMAS: dict[str, dict[str, Any]] = {
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string", "maxLength": 10},
            "in": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 3},
            "from": {"type": "object", "properties": {"year": {"type": "integer", "minimum": 1, "maximum": 9}}},
        },
        "required": ["query", "in"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["home", 'a "b"', {"x": []}, None]}},
    },
    "search_more": {
        "type": "object",
        "properties": {"at": {"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
SCHEMAS["search"]["properties"]["from"]["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": name, **({"parameters": schema} if schema["properties"] else {})}}
    for name, schema in SCHEMAS.items()
]
MARKERS = {"<tool_call>": 5, "</tool_call>": 6, "[TOOL_CALLS]": 7, "[ARGS]": 8}
"""Ids of control tokens that the small vocabulary has for other ends."""


@pytest.mark.parametrize("special", [{}, MARKERS], ids=["spelled", "special"])
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "single"])
@pytest.mark.parametrize(
    ("name", "template"),
    [("hermes", ""), ("llama3", ""), ("mistral", ""), ("mistral", "[TOOL_CALLS]["), ("mistral", "[ARGS]")],
)
def test_a_forced_call_is_found_again_with_arguments_that_fit(
    name: str, template: str, parallel: bool, special: dict[str, int]
) -> None:
    format = tool_format_of(template, name, special)
    use = read_tools(TOOLS, "required", parallel)
    grammar = use.grammar(format)
    assert grammar is not None
    shown = {token_id: text for text, token_id in special.items()}
    called, most = set(), 0
    for seed in range(8):
        text, complete = write(grammar, seed, shown=shown)
        assert complete
        numbers = iter(range(100))
        parser = use.parser(format, lambda numbers=numbers: f"call_{next(numbers)}")
        assert parser is not None
        pieces = [piece for at in range(0, len(text), 5) for piece in parser.push(text[at : at + 5])] + parser.finish()
        assert text_of(pieces) == ""
        calls = calls_of(pieces)
        for tool_name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[tool_name])
        called |= {tool_name for tool_name, _ in calls}
        most = max(most, len(calls))
        assert calls
    assert len(called) > 1
    assert (most > 1) == parallel


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_named_tool_is_called_once_and_no_other(name: str) -> None:
    format = tool_format_of("", name)
    use = read_tools(TOOLS, {"type": "function", "function": {"name": "search_more"}})
    grammar = use.grammar(format)
    assert grammar is not None
    for seed in range(4):
        text, complete = write(grammar, seed)
        assert complete
        parser = use.parser(format, lambda: "call_0")
        assert parser is not None
        assert [tool_name for tool_name, _ in calls_of([*parser.push(text), *parser.finish()])] == ["search_more"]


def test_markers_are_what_a_detokenizer_must_show() -> None:
    assert set(tool_format_of("", "hermes").markers) == {"<tool_call>", "</tool_call>"}
    assert set(tool_format_of("", "llama3").markers) == {"<|python_tag|>"}
    assert set(tool_format_of("", "mistral").markers) == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
