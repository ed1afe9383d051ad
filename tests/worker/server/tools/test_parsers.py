"""What each family's parser finds, and what it leaves as text; always the same however the text is cut."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

from tests.worker.server.tools.reading import calls_of, joined, pieces_of, read, text_of
from worker.server.tools import CallArguments, CallStart, Text, tool_format_of

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Tokyo"},
    {
        "string": "x",
        "integer": -3,
        "float": 2.5e-7,
        "boolean": True,
        "null": None,
        "list": [1, [2]],
        "object": {"a": {}},
    },
    {"text": 'He said "hi {there}" \\ [not a list], </tool_call> ; [TOOL_CALLS] <|python_tag|>\n\tend'},
    {"name": "get_time", "arguments": {"name": "f"}, "parameters": {}},
    {"unicode": "naïve 日本語 😀", "": "empty key"},
    {"deep": {"a": {"b": {"c": {"d": [[[{"e": 1}]]]}}}}},
]


def written(arguments: dict[str, Any], style: str) -> str:
    return {
        "spaced": json.dumps(arguments),
        "compact": json.dumps(arguments, separators=(",", ":"), ensure_ascii=False),
        "pretty": json.dumps(arguments, indent=2),
    }[style]


def spelled(form: str, calls: list[tuple[str, str]]) -> str:
    """Calls as a family writes them."""
    if form == "mistral named":
        return "".join(f"[TOOL_CALLS]{name}{arguments}" for name, arguments in calls)
    if form == "mistral args":
        return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcDEF123[ARGS]{arguments}" for name, arguments in calls)
    key = "parameters" if form.startswith("llama3") else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    match form:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "hermes tight":
            return "".join(f"<tool_call>{one}</tool_call>" for one in objects)
        case "llama3":
            return "; ".join(objects)
        case "llama3 tagged":
            return "<|python_tag|>" + "; ".join(objects)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case "mistral tight":
            return f"[TOOL_CALLS][{','.join(objects)}]"
    raise AssertionError(form)


FORMS = [
    "hermes",
    "hermes tight",
    "llama3",
    "llama3 tagged",
    "mistral",
    "mistral tight",
    "mistral named",
    "mistral args",
]


def family(form: str) -> str:
    return form.split()[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("style", ["spaced", "compact", "pretty"])
def test_arguments_come_exactly_as_they_were_written(form: str, style: str) -> None:
    for arguments in ARGUMENTS:
        as_written = written(arguments, style)
        pieces = pieces_of(family(form), spelled(form, [("get_weather", as_written)]))
        assert calls_of(pieces) == [("get_weather", as_written)]
        assert text_of(pieces) == ""


@pytest.mark.parametrize("form", FORMS)
def test_parallel_calls_are_numbered_in_order(form: str) -> None:
    calls = [("get_weather", '{"city": "Oslo"}'), ("get_time", "{}"), ("f.more-2", '{"x": [1, 2]}')]
    pieces = pieces_of(family(form), spelled(form, calls))
    assert calls_of(pieces) == calls
    assert text_of(pieces) == ""


@pytest.mark.parametrize("form", FORMS)
def test_text_around_calls_is_kept_and_white_space_between_them_is_not(form: str) -> None:
    body = spelled(form, [("f", '{"a": 1}')])
    pieces = joined(pieces_of(family(form), f"Let me see. \n{body}\n\nDone {{so far}} <b> [x]."))
    assert pieces == [
        Text("Let me see. \n"),
        CallStart(0, "call_0", "f"),
        CallArguments(0, '{"a": 1}'),
        Text("\n\nDone {so far} <b> [x]."),
    ]
    assert text_of(pieces_of(family(form), f" \n{body}\n {body} \n")) == ""


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_cut_the_text_gives_the_same(form: str) -> None:
    text = "Hi " + spelled(form, [("f", '{"a": "}\\"]"}'), ("get_time", "{}")]) + " bye"
    whole = joined(pieces_of(family(form), text))
    assert len(calls_of(whole)) == 2
    assert joined(pieces_of(family(form), text, range(len(text)))) == whole
    for cut in range(len(text)):
        assert joined(pieces_of(family(form), text, [cut])) == whole
    for cuts in combinations(range(0, len(text), 3), 2):
        assert joined(pieces_of(family(form), text, cuts)) == whole


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_streamed_not_saved_up(form: str) -> None:
    """The name is out before the arguments end, and no character of them is held back."""
    text = spelled(form, [("get_weather", '{"city": "Ulaanbaatar", "days": 3}')])
    parser = tool_format_of("", family(form)).parser(["get_weather"])
    middle = text.index("Ulaan") + 5
    pieces = [piece for character in text[:middle] for piece in parser.push(character)]
    assert isinstance(pieces[0], CallStart)
    assert "".join(piece.text for piece in pieces if isinstance(piece, CallArguments)) == '{"city": "Ulaan'


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
def test_text_without_calls_is_passed_on_at_once(form: str) -> None:
    parser = tool_format_of("", form).parser(["f"])
    for word in ["It ", "is 5 < 6", " and [1, 2", "] is a list, ", "you know."]:
        assert parser.push(word) == [Text(word)]
    assert parser.finish() == []


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3 tagged"])
def test_keys_may_stand_in_any_order_and_others_are_skipped(form: str) -> None:
    key = "parameters" if form.startswith("llama3") else "arguments"
    early = f'"id": [1, {{"a": "}}"}}], "{key}" : {{"name": "Bob"}} , "type":"function"'
    text = f'{{{early}, "name"\n:"get_weather", "x": 1.5}}'
    wrapped = {
        "hermes": f"<tool_call>{text}</tool_call>",
        "mistral": f"[TOOL_CALLS] [{text}]",
        "llama3 tagged": f"<|python_tag|> {text}",
    }[form]
    assert read(family(form), wrapped) == ("", [("get_weather", {"name": "Bob"})])


def test_arguments_that_were_encoded_twice_are_decoded_once() -> None:
    body = '{"name": "f", "arguments": "{\\"q\\": \\"\\u00e9\\"}"}'
    assert read("hermes", f"<tool_call>{body}</tool_call>") == ("", [("f", {"q": "é"})])


def test_a_marked_call_without_arguments_has_none() -> None:
    assert read("hermes", '<tool_call>{"name": "get_time"}</tool_call>') == ("", [("get_time", {})])
    assert read("mistral", '[TOOL_CALLS] [{"name": "get_time"}]') == ("", [("get_time", {})])
    assert read("llama3", '{"name": "get_time"}') == ('{"name": "get_time"}', [])


def test_hermes_closing_tag_may_be_missing_or_early() -> None:
    assert read("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}') == ("", [("f", {"a": 1})])
    assert read("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_ca') == ("", [("f", {"a": 1})])
    assert read("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> ok') == (" ok", [("f", {"a": 1})])
    assert read(
        "hermes", '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "get_time", "arguments": {}}'
    ) == (
        "",
        [("f", {}), ("get_time", {})],
    )


@pytest.mark.parametrize("separator", [";", "; ", " ;\n", "\n", ""])
def test_llama_separates_calls_in_many_ways(separator: str) -> None:
    one, two = '{"name": "f", "parameters": {"q": 1}}', '{"name": "get_time", "arguments": {}}'
    assert read("llama3", one + separator + two) == ("", [("f", {"q": 1}), ("get_time", {})])


def test_llama_takes_no_other_json_for_a_call() -> None:
    for text in (
        '{"name": "Ada", "parameters": {}}',
        '{"name": "f", "age": 36, "parameters": {}}',
        '{"answer": {"name": "f", "parameters": {}}}',
        '{"name": "Ada", "children": [{"name": "f", "parameters": {}}]} and more',
        "<|python_tag|>print({1: 2})",
        "function() { return {}; }",
    ):
        assert read("llama3", text) == (text, [])


def test_llama_finds_a_call_after_other_json() -> None:
    call = '{"name": "f", "parameters": {}}'
    for other in ('{"a": [1, "}"]} ', "{searchTool} ", "f(x) { return 1; } ", "{ ", '{"name": "Ada"} '):
        assert read("llama3", other + call) == (other, [("f", {})])


def test_mistral_shows_no_head_of_a_call_for_arguments() -> None:
    assert read("mistral", '[TOOL_CALLS][TOOL_CALLS]f{"a": 1}') == ("[TOOL_CALLS]", [("f", {"a": 1})])
    assert read("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]\nmore') == ("\nmore", [("f", {})])
    assert read("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}') == ("", [("f", {})])


MALFORMED = [
    "",
    "<tool_call>",
    "<tool_call></tool_call>",
    "</tool_call>",
    "<tool_call>get_weather(city)</tool_call>",
    '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "\\ud800{}"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {city: 1}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}, ',
    "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    '<tool_call>{"na\\me": "f"}</tool_call>',
    '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
    '<tool_call>{"name" "f"}',
    '<tool_call>{"name": "f",}',
    '<tool_call>{"name": "f", "arguments": nul',
    "<tool_cal",
    "{",
    "{}",
    '{"name"',
    '{"name": "f", "parameters": ',
    '{"name": "f", "parameters": {',
    '{"name": "f", "parameters": null}',
    '{"name": "f", "parameters": {invalid json}',
    "<|python_tag|>",
    "<|python_tag|> ",
    "<|python_tag|>{]",
    "[TOOL_CALLS]",
    "[TOOL_CALLS] [",
    "[TOOL_CALLS] []",
    "[TOOL_CALLS] not json at all",
    "[TOOL_CALLS]f",
    "[TOOL_CALLS]f[ARGS",
    "[TOOL_CALLS]f[ARGS]{",
    '[TOOL_CALLS]nobody{"a": 1}',
    "[TOOL_CALLS]f{a: 1}",
    "[TOOL_CALLS]" + "x" * 300 + '{"a": 1}',
    "[TOOL_CALLS]" + " " * 300 + '[{"name": "f", "arguments": {}}]',
    '[TOOL_CALLS] [{"name": "f"',
    "[TOOL_CALL",
    "\x00\ud800",
]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        pytest.param(form, text, id=f"{form} {at}")
        for form in ("hermes", "llama3", "mistral")
        for at, text in enumerate(MALFORMED)
        # To Llama these hold a call: it has no marks that could be wrong.
        if not (form == "llama3" and '{"name": "f", "arguments": {}}' in text)
    ],
)
def test_what_is_no_call_is_text_to_the_last_character(form: str, text: str) -> None:
    for cuts in ([], range(len(text))):
        pieces = pieces_of(form, text, cuts)
        assert calls_of(pieces) == []
        assert text_of(pieces) == text


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_is_cut_off_keeps_what_was_written(form: str) -> None:
    arguments = '{"city": "Os'
    whole = spelled(form, [("f", "{}"), ("get_weather", '{"city": "Oslo"}')])
    text = whole[: whole.index('"Os') + 3]
    assert calls_of(pieces_of(family(form), text)) == [("f", "{}"), ("get_weather", arguments)]


def test_broken_arguments_end_at_the_fault_and_the_rest_is_text() -> None:
    pieces = pieces_of("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}} and so on')
    assert calls_of(pieces) == [("f", '{"a": [1')]
    assert text_of(pieces) == "}}} and so on"


def test_long_malformed_text_takes_linear_time() -> None:
    """Were each attempt to read a call followed by another inside the same text, these would take quadratic time."""
    for form, unit in (("llama3", '{"parameters":'), ("hermes", "<tool_call>{"), ("mistral", "[TOOL_CALLS][")):
        text = unit * 6_000
        assert text_of(pieces_of(form, text, range(0, len(text), 5))) == text
