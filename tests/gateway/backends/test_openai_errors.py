"""What an answer's status and body say, in the shapes that servers have for it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.openai_errors import refusal
from gateway.backends.retry_after import MOST_S, finest, for_clients, retry_after_s

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def told(status: int, body: object, retry_after: str | None = None) -> tuple[Any, dict[str, Any]]:
    """The fault, and the error that the client is shown."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    fault = refusal(status, raw, retry_after, now=NOW)
    shown = json.loads(fault.error().encode())["error"]
    assert set(shown) >= {"message"}
    return fault, shown


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too long", "type": "x", "param": None, "code": None}}, "too long"),
        ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, "too long"),
        ({"message": "too long", "code": 400}, "too long"),
        ({"error": "too long"}, "too long"),
        ([{"error": {"code": 400, "message": "too long", "status": "INVALID_ARGUMENT"}}], "too long"),
        ({"detail": "too long"}, "too long"),
        ({"detail": [{"loc": ["body", "n"], "msg": "too big"}, {"msg": "and more"}]}, "n: too big; and more"),
        ({"error": {"message": "half \ud83d"}}, "half \ud83d"),
        ({"error": {"message": None, "code": 400}}, "The backend failed."),
        (b"too long", "too long"),
    ],
)
@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_is_wrong_with_a_request_is_told_and_not_tried_again(status: int, body: object, message: str) -> None:
    fault, shown = told(status, body)
    assert fault.error().status == status
    assert shown["message"] == message
    assert not fault.retryable
    assert not fault.unhealthy


def test_an_error_in_openais_shape_is_passed_on_byte_for_byte() -> None:
    body = b'{ "error": {"message": "no", "type": "t", "param": "p", "code": "c", "new": 1.50}, "id": 7 }'
    fault = refusal(400, body, None, now=NOW)
    error = fault.error()
    assert error.encode() == body
    assert (error.body.message, error.body.type, error.body.param, error.body.code) == ("no", "t", "p", "c")


@pytest.mark.parametrize("body", [b"<html>secret</html>", b"", b"{", b"[]", b"12", b"{}", b"\x00\x01", b"x" * 5000])
@pytest.mark.parametrize("status", [400, 413, 422, 429, 500, 503, 302, 204, 418, 451])
def test_what_cannot_be_read_has_words_of_ours(status: int, body: bytes) -> None:
    fault, shown = told(status, body)
    assert "secret" not in shown["message"]
    expected = {413: 413, 429: 503, 503: 503}.get(status, 502)
    assert fault.error().status == expected


def test_a_body_that_was_too_long_to_read_is_none() -> None:
    assert refusal(400, None, None, now=NOW).error().status == 502


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405, 407])
@pytest.mark.parametrize("body", [{"error": {"message": "secret", "code": "x"}}, b"secret", b"<html>secret"])
def test_what_is_wrong_with_us_is_never_shown_as_the_clients(status: int, body: object) -> None:
    fault, shown = told(status, body)
    assert fault.error().status == 502
    assert fault.code == ("backend_not_found" if status in (404, 405) else "backend_unauthorized")
    assert fault.retryable
    assert "secret" not in json.dumps(shown)
    # A wall before the server may refuse what some requests say: that is no mark against the server.
    assert fault.unhealthy == (status != 403 or body != b"<html>secret")
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert not refusal(status, raw, None, now=NOW, elsewhere=False).retryable


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, {"code": 400, "status": "INVALID_ARGUMENT", "details": [{"reason": "API_KEY_INVALID"}]}),
        (429, {"code": "insufficient_quota", "type": "insufficient_quota"}),
        (400, {"type": "authentication_error"}),
    ],
)
def test_a_wrong_key_by_another_status_is_one(status: int, error: dict[str, Any]) -> None:
    fault, _ = told(status, {"error": error | {"message": "x"}})
    assert (fault.code, fault.error().status) == ("backend_unauthorized", 502)


@pytest.mark.parametrize("word", ["forbidden", "unauthorized", "permission_error", "not_found"])
def test_other_words_do_not_make_a_bad_request_the_backends_fault(word: str) -> None:
    """As of an image that the backend may not fetch: a client could make backends look dead by it."""
    fault, shown = told(400, {"error": {"message": "x", "code": word}})
    assert (fault.error().status, shown["code"], fault.unhealthy) == (400, word, False)


@pytest.mark.parametrize("status", [500, 502, 504, 520, 529])
def test_failures_are_tried_elsewhere_and_not_shown(status: int) -> None:
    fault, shown = told(status, {"error": {"message": "secret", "type": "server_error"}})
    assert fault.error().status == (504 if status == 504 else 502)
    assert fault.retryable
    assert fault.unhealthy
    assert "secret" not in shown["message"]


@given(
    st.integers(100, 999),
    st.binary(max_size=200)
    | st.builds(
        lambda v: json.dumps(v).encode(),
        st.recursive(
            st.none() | st.text() | st.integers() | st.floats(),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["error", "message", "code", "type", "detail", "object", "details"]),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=6,
        ),
    ),
    st.none() | st.text(max_size=20),
)
def test_no_refusal_raises(status: int, body: bytes, retry_after: str | None) -> None:
    fault = refusal(status, body, retry_after, now=NOW)
    error = fault.error()
    assert 400 <= error.status < 600
    assert error.status not in (401, 403, 404)
    json.loads(error.encode())
    for value in error.headers.values():
        value.encode("ascii")
    assert " " not in fault.code
    assert fault.code.isprintable()


@pytest.mark.parametrize(
    ("header", "seconds", "passed_on"),
    [
        (None, None, None),
        ("7", 7.0, "7"),
        (" 7 ", 7.0, "7"),
        ("0", 0.0, "0"),
        ("0.35", 0.35, "1"),
        ("999999999", MOST_S, "999999999"),
        ("-1", None, "-1"),
        ("soon", None, "soon"),
        ("sp\xe4ter", None, None),
        ("Sun, 01 Mar 2026 12:00:30 GMT", 30.0, "Sun, 01 Mar 2026 12:00:30 GMT"),
        ("Sun, 01 Mar 2026 13:00:30 +0100", 30.0, "Sun, 01 Mar 2026 13:00:30 +0100"),
        ("Sun, 01 Mar 2026 12:00:30 -0000", 30.0, "Sun, 01 Mar 2026 12:00:30 -0000"),
        ("Sun, 01 Mar 2020 12:00:00 GMT", 0.0, "Sun, 01 Mar 2020 12:00:00 GMT"),
        ("Sun, 01 Mar 9999 12:00:00 GMT", MOST_S, "Sun, 01 Mar 9999 12:00:00 GMT"),
        ("Sun, 99 Mar 2026 12:00:00 GMT", None, "Sun, 99 Mar 2026 12:00:00 GMT"),
        ("x" * 65, None, None),
    ],
)
def test_when_to_come_again(header: str | None, seconds: float | None, passed_on: str | None) -> None:
    assert retry_after_s(header, NOW) == seconds
    assert for_clients(header) == passed_on
    for status in (429, 503):
        fault = refusal(status, b'{"error":{"message":"busy","code":"x"}}', header, now=NOW)
        assert fault.retry_after_s == seconds
        assert fault.error().headers.get("retry-after") == passed_on
        assert refusal(status, b"", header, now=NOW).retry_after_s == seconds


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [("350", "0.350"), ("0", "0.000"), ("1e9", "2"), (None, "2"), ("-5", "2"), ("x", "2")]
)
def test_milliseconds_are_finer(milliseconds: str | None, seconds: str) -> None:
    assert finest("2", milliseconds) == seconds


def test_a_date_is_measured_from_the_time_that_it_is_given() -> None:
    later = NOW + timedelta(seconds=10)
    assert retry_after_s("Sun, 01 Mar 2026 12:00:30 GMT", later) == 20.0
