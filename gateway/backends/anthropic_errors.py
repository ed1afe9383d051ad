"""Errors of Anthropic's API, as an answer's status and body or as an event in a stream; both have one shape::

    {"type": "error", "error": {"type", "message"}, "request_id"}

Reference: https://platform.claude.com/docs/en/api/errors
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

import msgspec

from gateway.backends.faults import BackendError, BackendFault
from gateway.backends.masking import masked
from gateway.backends.retry_after import for_clients, retry_after_s
from worker.protocol.errors import ErrorBody

STATUSES: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "overloaded_error": 529,
    "timeout_error": 504,
}
OVERLOADED: Final = 529
"""A status of Anthropic's own. Others know it as a 503, and so does all of the gateway."""
LONGEST_MESSAGE = 4096
_OPENAI: Final = {
    "request_too_large": ("invalid_request_error", "request_too_large"),
    "rate_limit_error": ("rate_limit_error", "rate_limit_exceeded"),
    "overloaded_error": ("server_error", "engine_overloaded"),
    "api_error": ("server_error", "backend_error"),
}
"""Type and code by which clients of OpenAI's API know the same."""
_TOO_LONG = re.compile(r"prompt is too long|exceed context limit", re.IGNORECASE)
_OF_THE_ACCOUNT = re.compile(r"credit balance|usage limit|spend limit|organization has been disabled", re.IGNORECASE)
"""Anthropic calls these bad requests, but no other request would fare better."""
_LIKE_A_KEY = re.compile(rb"\bsk-ant-[A-Za-z0-9_*.-]{4,}")


class _Error(msgspec.Struct):
    type: str = ""
    message: str = ""


class _Envelope(msgspec.Struct):
    error: _Error


_decoder = msgspec.json.Decoder(_Envelope)


def error_of_event(data: bytes, *, secrets: Iterable[str] = ()) -> BackendFault:
    """What an event, or a body, of type ``error`` means."""
    told = _told(data)
    if told is None:
        return _unreadable(500, None)
    return _fault(STATUSES.get(told.type, 500), told, data, None, None, secrets)


def refusal(status: int, body: bytes | None, retry_after: str | None, *, secrets: Iterable[str] = ()) -> BackendFault:
    """What an answer with a status other than 200 means. ``secrets`` must not be passed on, though it repeats them."""
    after_s = retry_after_s(retry_after, datetime.now(UTC))
    told = _told(body) if body else None
    if told is None or body is None:
        return _unreadable(status, after_s)
    return _fault(status, told, body, for_clients(retry_after), after_s, secrets)


def _fault(
    status: int, told: _Error, body: bytes, retry_after: str | None, after_s: float | None, secrets: Iterable[str]
) -> BackendFault:
    if status == 400 and _OF_THE_ACCOUNT.search(told.message):
        status = 402
    if status in (401, 402, 403, 404, 405, 407, 408, 504):
        return _unreadable(status, after_s)
    status = 503 if status == OVERLOADED else status
    kind, code = _OPENAI.get(told.type, ("server_error" if status >= 500 else "invalid_request_error", None))
    if _TOO_LONG.search(told.message):
        code = "context_length_exceeded"
    message = _masked(told.message.encode(errors="replace"), secrets).decode(errors="replace")[:LONGEST_MESSAGE]
    if status == 503 and retry_after is None:
        retry_after = "1"
    return BackendError(
        status,
        _masked(body, secrets),
        code=told.type if told.type in STATUSES else "backend_error",
        retryable=status >= 500 or status == 429,
        retry_after=retry_after,
        family="anthropic",
        told=ErrorBody(message or "The backend failed.", kind, None, code),
        unhealthy=status >= 500,
        retry_after_s=after_s,
    )


def _unreadable(status: int, after_s: float | None) -> BackendFault:
    """What the client cannot be shown, or what nobody said."""
    if status in (401, 402, 403, 407):
        return BackendFault(
            "backend_unauthorized",
            "The model's backend refused the gateway's own credentials. Your API key is not at fault. Tell the "
            "operator.",
        )
    if status in (404, 405):
        return BackendFault(
            "backend_not_found",
            "The backend does not know the model or the address that the gateway asked it for. Tell the operator.",
        )
    if status in (408, 504):
        return BackendFault("backend_timeout", "The backend took too long. Send the request again.", status=504)
    if status in (429, 503, OVERLOADED):
        return BackendFault(
            "engine_overloaded",
            "The model's backend is busy. Try again shortly.",
            status=503,
            unhealthy=status != 429,
            retry_after_s=after_s,
        )
    if status == 413:
        return BackendFault(
            "request_too_large",
            "The model's backend does not take so large a request. Send less.",
            status=413,
            retryable=False,
            unhealthy=False,
        )
    return BackendFault(
        "backend_error",
        f"The model's backend failed with status {status}. Send the request again; if it persists, tell the operator.",
        retryable=status >= 500,
        unhealthy=status >= 500,
    )


def _told(body: bytes) -> _Error | None:
    try:
        return _decoder.decode(body).error
    except (msgspec.DecodeError, RecursionError):
        return None


def _masked(body: bytes, secrets: Iterable[str]) -> bytes:
    return _LIKE_A_KEY.sub(b"***", masked(body, secrets))
