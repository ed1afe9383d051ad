"""Which grammar a request asks for; every refusal names the field and the reason, before anything runs."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.grammar_sampling import write
from worker.engine.messages import Grammar
from worker.protocol.errors import ApiError
from worker.server.structured import MAX_GRAMMAR_BYTES, response_grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
UNSUPPORTED = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2, "uniqueItems": True}


def of_openai(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def asked(**fields: Any) -> Grammar:
    grammar = response_grammar(**fields)
    assert grammar is not None
    return grammar


def refused(**fields: Any) -> tuple[str | None, str | None, str]:
    with pytest.raises(ApiError) as caught:
        response_grammar(**fields)
    assert caught.value.status == 400
    body = caught.value.body
    return body.param, body.code, body.message


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_plain_text_has_no_grammar(fields: dict[str, Any]) -> None:
    assert response_grammar(**fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": of_openai(PERSON)},
        {"response_format": of_openai(PERSON, strict=True, description="A person.")},
        {"response_format": of_openai(PERSON, strict=None)},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON), "regex": None}},
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True, "disable_fallback": False}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON), "response_format": {"type": "text"}},
    ],
)
def test_every_way_to_send_a_schema_means_the_same(fields: dict[str, Any]) -> None:
    assert asked(**fields) == asked(response_format=of_openai(PERSON))


def test_outputs_fit_the_schema_and_waste_no_tokens_on_white_space() -> None:
    grammar = asked(response_format=of_openai(PERSON))
    spaces = set()
    for seed in range(20):
        text, complete = write(grammar, seed)
        assert complete
        value = json.loads(text)
        jsonschema.validate(value, PERSON)
        outside = re.sub(r'"(\\.|[^"\\])*"', "", text)
        assert re.fullmatch(r"([{}\[\]0-9]|[:,] ?)*", outside), text
        spaces.add(" " in outside)
    assert spaces == {True, False}, "one space is allowed, as json.dumps writes it, and not demanded"


def test_a_schema_may_say_itself_what_white_space_it_wants() -> None:
    text, complete = write(asked(guided_json={**PERSON, "x-guidance": {"key_separator": " => "}}), 1)
    assert complete
    assert re.match(r'\{"name" => "', text)


def test_json_objects_are_objects() -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        ended = [
            json.loads(text)
            for text, complete in (write(asked(**fields), seed, most=60) for seed in range(15))
            if complete
        ]
        assert ended
        assert all(isinstance(value, dict) for value in ended)


def test_a_schema_of_anything_allows_any_value() -> None:
    kinds = {
        type(json.loads(text))
        for text, complete in (write(asked(guided_json=True), s, most=40) for s in range(25))
        if complete
    }
    assert len(kinds) > 2


def test_what_no_grammar_can_hold_is_refused_unless_the_schema_is_not_strict() -> None:
    for strict in ({}, {"strict": True}):
        param, code, message = refused(response_format=of_openai(UNSUPPORTED, **strict))
        assert (param, code) == ("response_format.json_schema.schema", "invalid_value")
        assert "uniqueItems" in message
    text, complete = write(asked(response_format=of_openai(UNSUPPORTED, strict=False)), 3)
    assert complete
    assert 1 <= len(json.loads(text)) <= 2


@pytest.mark.parametrize(
    "grammar",
    ['start: "<" WORD ">"\nWORD: /[a-z]{1,5}/', 'root ::= "<" word ">"\nword ::= [a-z]{1,5}'],
    ids=["lark", "gbnf"],
)
@pytest.mark.parametrize("where", ["guided_grammar", "structured_outputs"])
def test_grammars_in_either_syntax(grammar: str, where: str) -> None:
    fields: dict[str, Any] = {where: grammar if where == "guided_grammar" else {"grammar": grammar}}
    for seed in range(3):
        text, complete = write(asked(**fields), seed)
        assert complete
        assert re.fullmatch("<[a-z]{1,5}>", text)


def test_a_regular_expression_rules_the_whole_output() -> None:
    for seed in range(3):
        text, complete = write(asked(guided_regex=r"\d{1,3}\.\d{1,3}"), seed)
        assert complete
        assert re.fullmatch(r"\d{1,3}\.\d{1,3}", text)


CHOICES = [
    "yes",
    "yes, but",
    'say "no"',
    "back\\slash",
    "two\nlines",
    "é😀",
    " padded ",
    "%json {}",
    "<|im_end|>",
    "a|b",
    "#x",
]


def test_a_choice_is_one_of_those_offered_letter_by_letter() -> None:
    drawn = set()
    for seed in range(60):
        text, complete = write(asked(guided_choice=CHOICES), seed)
        assert complete
        drawn.add(text)
    assert drawn <= set(CHOICES)
    assert len(drawn) > len(CHOICES) // 2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_text_can_be_a_choice(choices: list[str]) -> None:
    assert asked(structured_outputs={"choice": choices}).kind == "lark"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["json_object"]}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
        ({"response_format": of_openai(None)}, "response_format.json_schema.schema"),
        ({"response_format": of_openai("x")}, "response_format.json_schema.schema"),
        ({"response_format": of_openai({"type": "person"})}, "response_format.json_schema.schema"),
        ({"response_format": of_openai(PERSON, strict="yes")}, "response_format.json_schema.strict"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": of_openai({"x-guidance": 1})}, "response_format.json_schema.schema.x-guidance"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": False}, "guided_json"),
        ({"guided_json": {"$ref": "https://example.com/schema"}}, "guided_json"),
        ({"guided_json": {"type": "string", "format": "colour"}}, "guided_json"),
        ({"guided_json": {"type": "string", "minLength": 3, "maxLength": 1}}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "(?<=a)b"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"guided_grammar": 'root ::= "a" | missing'}, "guided_grammar"),
        ({"guided_grammar": "(" * 20_000}, "guided_grammar"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    found, code, message = refused(**fields)
    assert found == param
    assert code
    assert repr(param) in message or param.split(".")[0] in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex"),
        ({"guided_grammar": 'start: "' + "a" * MAX_GRAMMAR_BYTES + '"'}, "guided_grammar"),
        ({"guided_choice": ["a" * 1000] + [f"{at:01000}" for at in range(200)]}, "guided_choice"),
        ({"guided_json": {"enum": ["a" * MAX_GRAMMAR_BYTES]}}, "guided_json"),
    ],
)
def test_what_is_too_large_is_refused_by_its_size(fields: dict[str, Any], param: str) -> None:
    found, _, message = refused(**fields)
    assert found == param
    assert str(MAX_GRAMMAR_BYTES) in message


MANY_PATTERNS = [{"type": "string", "pattern": f"a.{{{at}}}b"} for at in range(60)]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": MANY_PATTERNS},
        {"allOf": [{"type": "object", "properties": {"x": pattern}} for pattern in MANY_PATTERNS]},
        {"allOf": [{"type": "array", "items": pattern} for pattern in MANY_PATTERNS]},
        {
            "$ref": "#/$defs/0",
            "$defs": {str(at): {**pattern, "$ref": f"#/$defs/{at + 1}"} for at, pattern in enumerate(MANY_PATTERNS)},
        },
        {"allOf": [{"anyOf": [pattern, {"type": "null"}]} for pattern in MANY_PATTERNS]},
        {"type": "object", "patternProperties": {f"^p{at}[a-z]*x": {} for at in range(300)}},
        {"type": "array", "items": {"type": "object", "patternProperties": {f"^{at}[a-z]*x": {} for at in range(300)}}},
        {"$defs": {str(at): {"items": {"$ref": f"#/$defs/{at + 1}"}} for at in range(2000)}, "$ref": "#/$defs/0"},
    ],
    ids=["strings", "properties", "items", "references", "choices", "names", "nested names", "depth"],
)
def test_a_schema_that_would_take_for_ever_is_refused_before_it_does(schema: dict[str, Any]) -> None:
    for fields in ({"guided_json": schema}, {"guided_grammar": f"start: a\na: %json {json.dumps(schema)}"}):
        param, _, message = refused(**fields)
        assert param in fields
        assert "too long" in message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{at}": pattern for at, pattern in enumerate(MANY_PATTERNS)}},
        {"anyOf": MANY_PATTERNS},
        {
            "type": "object",
            "properties": {f"p{at}": {"$ref": "#/$defs/id"} for at in range(60)},
            "$defs": {"id": {"type": "string", "pattern": "^[a-z]+$"}},
        },
        {"allOf": [{"type": "object", "properties": {"a": MANY_PATTERNS[1]}}, {"properties": {"b": MANY_PATTERNS[2]}}]},
        {"$defs": {"a/b": {"type": "string", "format": "uuid"}}, "items": {"$ref": "#/$defs/a~1b"}, "type": "array"},
        {"type": "object", "properties": {"me": {"$ref": "#"}, "x": {"type": "string", "maxLength": 3}}},
    ],
    ids=["apart", "either", "shared", "merged", "escaped", "recursive"],
)
def test_many_patterns_that_do_not_meet_are_no_trouble(schema: dict[str, Any]) -> None:
    assert asked(guided_json=schema).kind == "json_schema"


def test_gbnf_may_not_be_as_long_as_lark() -> None:
    rules = "\n".join(f'a{at} ::= "{at}"' for at in range(2000))
    param, _, message = refused(guided_grammar=f"root ::= a0\n{rules}")
    assert param == "guided_grammar"
    assert "Lark" in message
