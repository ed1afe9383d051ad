"""Structured output: which grammar a request asks for, and whether it is one that can be followed.

``response_format`` is OpenAI's field; ``structured_outputs`` and ``guided_*`` are vLLM's names for the same.
Reference: https://platform.openai.com/docs/guides/structured-outputs
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from worker.engine.grammar import check_grammar
from worker.engine.messages import Grammar
from worker.protocol.errors import bad_request
from worker.server.schema_limits import excess

MAX_GRAMMAR_BYTES: Final = 128 * 1024
"""Longest text of a schema, an expression or a grammar: it bounds how long its check may take."""

MAX_GBNF_CHARACTERS: Final = 16 * 1024
"""Longest grammar in GBNF: turning it into Lark takes time in the square of its length."""
_EMBEDDED_SCHEMA: Final = re.compile(r"%json\s*")

COMPACT_JSON: Final = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
"""White space in JSON: one space after a comma or a colon, or none. Were more allowed, a small model could go on with
white space for ever. A schema's own "x-guidance" says otherwise if it likes."""

_ANY_OBJECT: Final = {"type": "object"}


def response_grammar(
    response_format: Any = None,
    structured_outputs: Any = None,
    *,
    guided_json: Any = None,
    guided_regex: Any = None,
    guided_choice: Any = None,
    guided_grammar: Any = None,
) -> Grammar | None:
    """The grammar that the fields of a request ask for; None if they ask for none.

    Raises ApiError (400) that names the field: of the wrong form, more than one at once, too large, or nothing that a
    grammar can hold. It takes about a millisecond for common schemas and up to a second for the largest: read large
    requests in a thread.
    """
    asked: dict[str, Callable[[], Grammar]] = {}
    if response_format is not None and (read := _response_format(response_format)) is not None:
        asked["response_format"] = read
    if structured_outputs is not None:
        asked |= _structured_outputs(structured_outputs)
    guided = {"json": guided_json, "regex": guided_regex, "choice": guided_choice, "grammar": guided_grammar}
    asked |= {
        f"guided_{name}": _reader(name, value, f"guided_{name}") for name, value in guided.items() if value is not None
    }
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise bad_request(
            f"{first!r} and {second!r} can't both rule the output. Send one of them.",
            param=second,
            code="invalid_value",
        )
    return next(iter(asked.values()))() if asked else None


def json_schema_grammar(schema: Mapping[str, Any] | bool, field: str, *, strict: bool | None = None) -> Grammar:
    """A grammar of the JSON values that a schema allows, in compact form. Raises ApiError (400) that names ``field``.

    ``strict`` False: keywords that no grammar can hold are ignored rather than refused; None: they are refused, too,
    and the request has no field to say otherwise.
    """
    grammar = Grammar("json_schema", compact_schema(schema, field, lenient=strict is False))
    if strict is None or strict is False:
        return _checked(grammar, field)
    return _checked(grammar, field, '. Send "strict": false to have what no grammar can hold ignored')


def compact_schema(schema: Mapping[str, Any] | bool, field: str, *, lenient: bool = False) -> str:
    """A schema's JSON text with this worker's rules on white space. Raises ApiError (400) that names ``field``."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise bad_request(f"{field!r} must be a JSON schema: an object.", param=field, code="invalid_type")
    own = schema.get("x-guidance", {})
    if not isinstance(own, Mapping):
        raise bad_request(f"'{field}.x-guidance' must be an object.", param=f"{field}.x-guidance", code="invalid_type")
    _check_work(schema, field)
    options = COMPACT_JSON | ({"lenient": True} if lenient else {}) | dict(own)
    try:
        return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise bad_request(f"{field!r} is nested too deeply.", param=field, code="invalid_value") from None


def _response_format(value: Any) -> Callable[[], Grammar] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return lambda: json_schema_grammar(_ANY_OBJECT, "response_format")
    if kind == "json_schema":
        return lambda: _openai_schema(value.get("json_schema"))
    raise bad_request(
        '\'response_format\' must be {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", '
        '"json_schema": {"name": "...", "schema": {...}}}.',
        param="response_format" if kind is None else "response_format.type",
        code="invalid_value" if kind is not None else "invalid_type",
    )


def _openai_schema(value: Any) -> Grammar:
    field = "response_format.json_schema"
    if not isinstance(value, dict):
        raise bad_request(
            f'{field!r} must be an object: {{"name": "...", "schema": {{...}}}}.',
            param=field,
            code="missing_required_parameter" if value is None else "invalid_type",
        )
    name = value.get("name")
    if name is not None and not isinstance(name, str):
        raise bad_request(f"'{field}.name' must be text.", param=f"{field}.name", code="invalid_type")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise bad_request(f"'{field}.strict' must be true or false.", param=f"{field}.strict", code="invalid_type")
    if value.get("schema") is None:
        raise bad_request(
            f"'{field}.schema' is missing. Send the JSON schema there.",
            param=f"{field}.schema",
            code="missing_required_parameter",
        )
    return json_schema_grammar(value["schema"], f"{field}.schema", strict=strict is not False)


def _structured_outputs(value: Any) -> dict[str, Callable[[], Grammar]]:
    field = "structured_outputs"
    if not isinstance(value, dict):
        raise bad_request(f"{field!r} must be an object.", param=field, code="invalid_type")
    given = {name: item for name, item in value.items() if item is not None}
    for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
        # How vLLM chooses among its grammar libraries; the answers here are its strictest already.
        if given.get(name) is False or (given.get(name) is True and name != "disable_additional_properties"):
            del given[name]
    readers: dict[str, Callable[[], Grammar]] = {}
    for name, item in given.items():
        if name not in _READERS:
            known = ", ".join(map(repr, _READERS))
            raise bad_request(
                f"'{field}.{name}' is not supported. It may hold one of: {known}.",
                param=f"{field}.{name}",
                code="unsupported_parameter",
            )
        readers[f"{field}.{name}"] = _reader(name, item, f"{field}.{name}")
    if not readers:
        raise bad_request(
            f"{field!r} is empty. It must hold one of: {', '.join(map(repr, _READERS))}.",
            param=field,
            code="missing_required_parameter",
        )
    return readers


def _reader(name: str, value: Any, field: str) -> Callable[[], Grammar]:
    return lambda: _READERS[name](value, field)


def _json(value: Any, field: str) -> Grammar:
    if isinstance(value, str):
        check_size(value, field)
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as fault:
            raise bad_request(f"{field!r} is no valid JSON: {fault}.", param=field, code="invalid_json") from None
    return json_schema_grammar(value, field)


def _json_object(value: Any, field: str) -> Grammar:
    if value is not True:
        raise bad_request(f"{field!r} must be true, or be left out.", param=field, code="invalid_value")
    return json_schema_grammar(_ANY_OBJECT, field)


def _regex(value: Any, field: str) -> Grammar:
    return _checked(Grammar("regex", _text(value, field)), field)


def _choice(value: Any, field: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise bad_request(f"{field!r} must be a list of texts, none of them empty.", param=field, code="invalid_type")
    alternatives = " | ".join(map(lark_string, dict.fromkeys(value)))
    return _checked(Grammar("lark", f"start: {alternatives}"), field)


def _lark(value: Any, field: str) -> Grammar:
    text = _text(value, field)
    check_size(text, field)
    if "::=" in text and len(text) > MAX_GBNF_CHARACTERS:
        raise bad_request(
            f"{field!r} is written in GBNF and has {len(text)} characters. At most {MAX_GBNF_CHARACTERS} are allowed "
            "in GBNF; in Lark it may be longer.",
            param=field,
            code="invalid_value",
        )
    try:
        # What is written as llama.cpp's GBNF (`root ::= ...`) becomes Lark; Lark stays as it is.
        text = any_to_lark(text)
    except Exception as fault:
        # A parser from elsewhere over text from anywhere: whatever it fails with, the text is the reason.
        raise bad_request(f"{field!r} is no valid grammar: {fault}.", param=field, code="invalid_value") from None
    for embedded in _EMBEDDED_SCHEMA.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, embedded.end())
        except (ValueError, RecursionError):
            raise bad_request(
                f"{field!r} has a '%json' that no JSON schema follows.", param=field, code="invalid_value"
            ) from None
        if isinstance(schema, Mapping):
            _check_work(schema, field)
    return _checked(Grammar("lark", text), field)


_READERS: Final[Mapping[str, Callable[[Any, str], Grammar]]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(f"{field!r} must be text, and not empty.", param=field, code="invalid_type")
    return value


def lark_string(text: str) -> str:
    """A string in Lark that stands for ``text``."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def check_size(text: str, field: str) -> None:
    size = len(text.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise bad_request(
            f"{field!r} is {size} bytes long. At most {MAX_GRAMMAR_BYTES} are allowed.",
            param=field,
            code="invalid_value",
        )


def _check_work(schema: Mapping[str, Any], field: str) -> None:
    if fault := excess(schema):
        raise bad_request(
            f"{field!r} holds a JSON schema that would take too long: {fault}.", param=field, code="invalid_value"
        )


def _checked(grammar: Grammar, field: str, remedy: str = "") -> Grammar:
    check_size(grammar.text, field)
    if fault := check_grammar(grammar):
        what = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}[grammar.kind]
        raise bad_request(
            f"{field!r} holds a {what} that can't be followed: {fault.rstrip('.')}{remedy}.",
            param=field,
            code="invalid_value",
        )
    return grammar
