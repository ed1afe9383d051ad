"""Errors in Anthropic's shape. Reference: https://docs.claude.com/en/api/errors"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.backends.anthropic_errors import OVERLOADED
from gateway.backends.faults import PassedOnError
from worker.protocol.errors import ApiError

VERSION_HEADER: Final = "anthropic-version"
"""Anthropic's clients send it with every request."""
_TYPES: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_type(status: int, code: str | None = None) -> str:
    if code == "insufficient_quota":
        return "billing_error"
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")


def status_of(error: ApiError) -> int:
    """Its HTTP status. Anthropic has one of its own for an overload, which the rest of the gateway does not know."""
    passed_on = isinstance(error, PassedOnError) and error.family == "anthropic"
    return OVERLOADED if passed_on and error.status == 503 else error.status


def encode_error(error: ApiError, request_id: str) -> bytes:
    """The body of an error answer, and the data of an error event. Anthropic's own error is passed on as it came."""
    if isinstance(error, PassedOnError) and error.family == "anthropic":
        return error.raw
    kind = error_type(error.status, error.body.code)
    told = {"type": "error", "error": {"type": kind, "message": error.body.message}, "request_id": request_id}
    return msgspec.json.encode(told)
