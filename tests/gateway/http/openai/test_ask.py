"""Bodies as they come from strangers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.openai.ask import parse_chat
from gateway.http.openai.fields import MAX_BESIDE_PROMPT, read_tags
from worker.protocol.errors import ApiError

MESSAGES = [{"role": "user", "content": "hi"}]


def parse(**fields: Any) -> Any:
    return parse_chat(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode())


def refused(raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat(raw)
    assert caught.value.status == 400
    return caught.value


def test_reads_what_the_gateway_needs() -> None:
    raw = json.dumps(
        {"model": "m", "messages": MESSAGES * 2, "stream": True, "stream_options": {"include_usage": True}, "n": 3}
        | {"max_tokens": 7, "temperature": 0, "unknown": {"kept": [1.5, None]}}
    ).encode()
    ask = parse_chat(raw)
    assert (ask.model, ask.size, ask.stream, ask.include_usage) == ("m", len(raw), True, True)
    assert (ask.choices, ask.max_output_tokens) == (3, 7)
    assert bytes(ask.body["unknown"]) == b'{"kept": [1.5, null]}'
    assert bytes(ask.body["temperature"]) == b"0"


def test_absent_and_null_fields_mean_the_default() -> None:
    for ask in (parse(), parse(stream=None, stream_options=None, n=None, max_tokens=None, max_completion_tokens=None)):
        assert (ask.stream, ask.include_usage, ask.choices, ask.max_output_tokens) == (False, False, 1, None)


def test_the_newer_name_of_the_output_cap_wins() -> None:
    assert parse(max_tokens=5, max_completion_tokens=9).max_output_tokens == 9
    assert parse(max_tokens=5).max_output_tokens == 5


def test_of_two_equal_keys_the_last_counts_and_only_it_is_sent_on() -> None:
    ask = parse_chat(b'{"model":"m","messages":[{}],"max_tokens":1,"max_tokens":400}')
    assert ask.max_output_tokens == 400
    assert bytes(ask.body["max_tokens"]) == b"400"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model":"m","messages":[{}],"temperature":NaN}',
        b'{"model":"m","messages":[{}],"temperature":Infinity}',
        b'{"model":"m","messages":[{}]} trailing',
        b'{"model":"m","messages":[{"content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"content":"\xff"}]}',
        b'\xef\xbb\xbf{"model":"m","messages":[{}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'"text"',
        b"null",
        b"[]",
        b"1",
    ],
    ids=lambda raw: repr(raw[:40]),
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    assert refused(raw).body.param is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"model": "x" * 10_000}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": "2"}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": False}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "messages": MESSAGES} | fields
    assert refused(json.dumps(body).encode()).body.param == param


def test_numbers_beyond_all_bounds_are_refused_where_they_count_and_passed_on_elsewhere() -> None:
    beyond = (b"1e999", b"9" * 10_000)
    for number in beyond:
        assert refused(b'{"model":"m","messages":[{}],"max_tokens":%b}' % number).body.param == "max_tokens"
        assert bytes(parse_chat(b'{"model":"m","messages":[{}],"seed":%b}' % number).body["seed"]) == number


def test_of_what_is_passed_on_no_value_becomes_a_python_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of small values took seconds in which the gateway did nothing else."""
    decoded: list[bytes] = []
    decode = msgspec.json.decode

    def watched(raw: bytes) -> Any:
        decoded.append(bytes(raw))
        return decode(raw)

    monkeypatch.setattr("gateway.http.openai.fields.msgspec.json.decode", watched)
    ask = parse(messages=[{"content": [{}] * 1000}], tools=[[]] * 1000)
    assert all(isinstance(value, msgspec.Raw) for value in ask.body.values())
    assert max(map(len, decoded)) < 10


def test_only_messages_may_be_large() -> None:
    assert parse(messages=[{"role": "user", "content": "x" * (2 * MAX_BESIDE_PROMPT)}]).size > MAX_BESIDE_PROMPT
    many = {str(number): 0 for number in range(MAX_BESIDE_PROMPT // 8)}
    assert (
        "beside its 'messages'"
        in refused(json.dumps({"model": "m", "messages": MESSAGES} | many).encode()).body.message
    )


@pytest.mark.parametrize("raw", [b"", b" \n"])
def test_an_empty_body_is_called_so(raw: bytes) -> None:
    with pytest.raises(ApiError, match="is empty"):
        parse_chat(raw)


def test_missing_fields_are_named() -> None:
    assert refused(b'{"messages":[{}]}').body.param == "model"
    assert refused(b'{"model":"m"}').body.param == "messages"


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_make_it_fail_otherwise(raw: bytes) -> None:
    try:
        parse_chat(raw)
    except ApiError as error:
        assert error.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("model", "messages", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens")


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON)))
def test_no_value_of_a_field_makes_it_fail_otherwise(fields: dict[str, Any]) -> None:
    raw = json.dumps({"model": "m", "messages": MESSAGES} | fields).encode(errors="surrogatepass")
    try:
        ask = parse_chat(raw)
    except ApiError as error:
        assert error.status == 400
    else:
        assert ask.choices >= 1


def test_the_end_user_is_whom_the_most_specific_field_names() -> None:
    assert parse().end_user is None
    assert parse(user="a").end_user == "a"
    assert parse(user="a", safety_identifier="b").end_user == "b"
    assert parse(user="a", safety_identifier="").end_user == "a"
    raw = json.dumps({"model": "m", "messages": MESSAGES, "user": "a", "safety_identifier": "b"}).encode()
    assert parse_chat(raw, end_user="Zoë").end_user == "Zoë"
    assert parse_chat(raw, end_user="").end_user == "b"
    assert parse(user="x" * 512).end_user == "x" * 512


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
@pytest.mark.parametrize("value", [7, ["a"], {"a": 1}, True, "x" * 513])
def test_an_end_user_is_a_text_that_is_not_long(field: str, value: Any) -> None:
    fault = refused(json.dumps({"model": "m", "messages": MESSAGES, field: value}).encode())
    assert fault.body.param == field


def test_a_header_with_a_long_end_user_is_named() -> None:
    with pytest.raises(ApiError, match="x-penstock-end-user"):
        parse_chat(json.dumps({"model": "m", "messages": MESSAGES}).encode(), end_user="x" * 513)


def test_tags_come_sorted_and_once() -> None:
    assert read_tags(None) == read_tags(" , ,") == ()
    assert read_tags("team=blue, beta,team=blue , Ünï code") == ("beta", "team=blue", "Ünï code")
    assert len(read_tags(",".join(str(at) * 64 for at in range(10)))) == 10


@pytest.mark.parametrize("header", [",".join(map(str, range(11))), "x" * 65, "a\x00b", "a\x7f", "a\u200bb"])
def test_tags_that_are_too_many_too_long_or_not_printable_are_refused(header: str) -> None:
    with pytest.raises(ApiError, match="x-penstock-tags") as caught:
        read_tags(header)
    assert caught.value.status == 400
