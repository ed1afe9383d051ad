"""Errors in the shape of the OpenAI API: ``{"error": {"message", "type", "param", "code"}}``.

Reference: https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """A failure that its reader can act on. ``status`` is the HTTP status; ``message`` says the remedy.

    Never put a secret, SQL or a stack into ``message``: it is sent to the caller as it stands.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message, type, param, code)
        self.headers: dict[str, str] = dict(headers or {})

    def encode(self) -> bytes:
        """The JSON body of an error answer; inside a stream, the data of an error event."""
        return msgspec.json.encode(ErrorEnvelope(self.body))


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def context_length_exceeded(message: str, *, param: str = "messages") -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unauthorized(message: str) -> ApiError:
    return ApiError(
        401, message, type="authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
    )


def model_not_found(model: str) -> ApiError:
    named = model if len(model) <= 200 else model[:197] + "..."
    return ApiError(
        404,
        f"The model {named!r} does not exist or this key may not use it. GET /v1/models lists the models it may use.",
        param="model",
        code="model_not_found",
    )


def overloaded(message: str, *, code: str = "engine_overloaded", retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, headers={"retry-after": str(retry_after_s)})


def server_error(message: str, *, status: int = 500, code: str = "internal_error") -> ApiError:
    return ApiError(status, message, type="server_error", code=code)
