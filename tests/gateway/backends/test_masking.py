"""A backend that repeats the gateway's own secrets does not get them through."""

from __future__ import annotations

import json

import pytest

from gateway.backends import anthropic_errors, openai_errors
from gateway.backends.masking import masked

SECRET = 'ab/c&"d\\e+12='


@pytest.mark.parametrize(
    "written",
    [
        SECRET,
        json.dumps(SECRET)[1:-1],
        json.dumps(SECRET)[1:-1].replace("/", "\\/").replace("&", "\\u0026"),
        "".join(f"\\u{ord(c):04X}" for c in SECRET),
    ],
)
def test_a_secret_is_known_however_json_writes_it(written: str) -> None:
    assert masked(f'{{"a":"x {written} y"}}'.encode(), [SECRET]) == b'{"a":"x *** y"}'
    assert masked(b'{"a":"\\u0061b\\/c"}', [SECRET]) == b'{"a":"\\u0061b\\/c"}'


@pytest.mark.parametrize(
    "error",
    [
        {"error": dict.fromkeys(("message", "type", "param", "code"), SECRET)},
        {"object": "error"} | dict.fromkeys(("message", "type", "param", "code"), SECRET),
        {"detail": SECRET},
        {"error": SECRET},
        [{"error": {"message": SECRET, "status": SECRET}}],
    ],
)
@pytest.mark.parametrize("status", [400, 429, 500])
def test_no_field_of_an_error_bears_a_secret(error: object, status: int) -> None:
    for body in (json.dumps(error), json.dumps(error).replace("/", "\\/")):
        for fault in (
            openai_errors.refusal(status, body.encode(), None, secrets=[SECRET]),
            anthropic_errors.refusal(status, body.encode(), None, secrets=[SECRET]),
        ):
            error_body = fault.error().body
            told = [error_body.message, error_body.type, error_body.param, error_body.code, fault.code]
            told.append(json.dumps(json.loads(fault.error().encode())))
            for text in told:
                assert "12" not in (text or "")


def test_metrics_know_an_error_of_a_backend_by_its_status() -> None:
    words = [openai_errors.refusal(400, b'{"error":{"message":"m","code":"c%d"}}' % n, None) for n in range(3)]
    assert {fault.outcome for fault in words} == {"status_400"}
    assert [fault.code for fault in words] == ["c0", "c1", "c2"]
    assert openai_errors.refusal(500, b"", None).outcome == "backend_error"
