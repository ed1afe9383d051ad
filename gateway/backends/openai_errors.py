"""Errors in OpenAI's shape, as an answer's status and body or as an event in a stream."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.backends.faults import BackendError, BackendFault
from worker.protocol.errors import ErrorBody

WORTH_ANOTHER_TRY = frozenset({408, 429})
NOT_FOR_THE_CLIENT = frozenset({401, 403, 404, 405, 407, 408})
"""Refusals that say something about gateway and backend, not about the request."""
_PASSING = frozenset({"engine_overloaded", "worker_stopping"})
"""Codes of error events that a repetition in a moment may well not meet again: for the client a 503."""
_RETRY_AFTER = re.compile(r"[\x20-\x7e]{1,64}")
_SECONDS = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,3})?")


def error_of_event(data: bytes) -> BackendError | None:
    """The fault that an event tells, if it tells one. An integer ``code`` is an HTTP status, as some servers use it."""
    try:
        event = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    error = event.get("error") if isinstance(event, dict) else None
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    if type(code) is int and 400 <= code < 600:
        status = code
    else:
        status = 503 if isinstance(code, str) and code in _PASSING else 502
    client_fault = status < 500 and status not in WORTH_ANOTHER_TRY
    return BackendError(
        status,
        msgspec.json.encode({"error": error}),
        code=_code(error) or "backend_error",
        retryable=not client_fault,
        retry_after="1" if status == 503 else None,
        told=_told(error, status),
        unhealthy=status >= 500,
    )


def refusal(status: int, body: bytes | None, retry_after: str | None) -> BackendFault:
    """What an answer with a status other than 200 means."""
    try:
        told = msgspec.json.decode(body) if body else None
    except (msgspec.DecodeError, RecursionError):
        told = None
    error = told.get("error") if isinstance(told, dict) else None
    retryable = status >= 500 or status in WORTH_ANOTHER_TRY
    shown = (400 <= status < 500 and status not in NOT_FOR_THE_CLIENT) or status == 503
    if retry_after is not None and not _RETRY_AFTER.fullmatch(retry_after):
        retry_after = None
    after_s = float(retry_after) if retry_after is not None and _SECONDS.fullmatch(retry_after) else None
    if shown and body is not None and isinstance(error, dict) and isinstance(error.get("message"), str):
        return BackendError(
            status,
            body,
            code=_code(error) or "backend_error",
            retryable=retryable,
            retry_after=retry_after,
            told=_told(error, status),
            unhealthy=status >= 500,
            retry_after_s=after_s,
        )
    if status == 429 or status == 503:
        return BackendFault(
            "engine_overloaded",
            "The workers are busy. Try again shortly.",
            status=503,
            unhealthy=status == 503,
            retry_after_s=after_s,
        )
    return BackendFault(
        "backend_error",
        f"The worker failed with status {status}. Send the request again; if it persists, tell the operator.",
        retryable=retryable,
    )


def _code(error: dict[str, Any]) -> str | None:
    code = error.get("code")
    if isinstance(code, str) and code:
        return code[:64]
    kind = error.get("type")
    return kind[:64] if isinstance(kind, str) and kind else None


def _told(error: dict[str, Any], status: int) -> ErrorBody:
    message, kind, param, code = (error.get(name) for name in ("message", "type", "param", "code"))
    return ErrorBody(
        message if isinstance(message, str) else "The backend failed.",
        kind if isinstance(kind, str) else ("server_error" if status >= 500 else "invalid_request_error"),
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
    )
