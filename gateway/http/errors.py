"""Errors that reach Litestar, in the shape of the API they belong to: OpenAI's or Anthropic's on /v1, problem details
elsewhere.

Problem details: RFC 9457.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from gateway.admission.redis import RedisUnavailable
from gateway.billing.report_query import InvalidReport, NotFound
from gateway.datakeys.master_keys import UnknownMasterKey
from gateway.db.engine import DatabaseUnavailable
from gateway.http.anthropic.errors import VERSION_HEADER, encode_error
from gateway.ids import uuid7
from gateway.promptlog.filters import BadCursor
from gateway.redis_url import NoCacheRedis
from gateway.routing.registry import RegistryUnavailable
from gateway.tenants.records import (
    AlreadyExists,
    ConfigurationError,
    InvalidField,
    NotAllowed,
    StateConflict,
    Unknown,
    VersionConflict,
)
from worker.protocol.errors import ApiError, server_error

_log = structlog.get_logger("gateway.http")

AnyRequest = Request[Any, Any, Any]
MESSAGES: Final = "/v1/messages"
MODELS: Final = "/v1/models"


class Problem(Exception):
    """An error answer of the admin and internal APIs; ``detail`` says the remedy, ``field`` what is at fault."""

    def __init__(
        self, status: int, detail: str, *, headers: dict[str, str] | None = None, field: str | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers or {}
        self.field = field


def _within(request: AnyRequest, place: str) -> bool:
    path = request.url.path
    return path == place or path.startswith(f"{place}/")


def _speaks_anthropic(request: AnyRequest) -> bool:
    """The models are told in either way."""
    return _within(request, MESSAGES) or (_within(request, MODELS) and VERSION_HEADER in request.headers)


def _answer(
    request: AnyRequest, status: int, message: str, code: str | None, headers: dict[str, str], param: str | None = None
) -> Response[bytes]:
    if _within(request, "/v1"):
        kind = "invalid_request_error" if status < 500 else "server_error"
        return _api_error(request, ApiError(status, message, type=kind, param=param, code=code, headers=headers))
    headers = {"x-request-id": str(uuid7()), **headers}
    problem: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": message,
    }
    if param is not None:
        problem["errors"] = [{"field": param, "detail": message}]
    return Response(
        msgspec.json.encode(problem), status_code=status, headers=headers, media_type="application/problem+json"
    )


def _api_error(request: AnyRequest, error: ApiError) -> Response[bytes]:
    headers = {"x-request-id": str(uuid7()), **error.headers}
    if _speaks_anthropic(request):
        headers["request-id"] = headers["x-request-id"]
        body = encode_error(error, headers["x-request-id"])
    else:
        body = error.encode()
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def _problem(request: AnyRequest, problem: Problem) -> Response[bytes]:
    return _answer(request, problem.status, problem.detail, None, problem.headers, problem.field)


def _http_exception(request: AnyRequest, exception: HTTPException) -> Response[bytes]:
    status = exception.status_code
    if status == HTTPStatus.NOT_FOUND:
        message, code = f"There is nothing at {request.url.path}. The API is described at /docs.", "not_found"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        message, code = f"{request.method} is not allowed at {request.url.path}.", "method_not_allowed"
    elif status >= 500:
        return _crashed(request, exception)
    else:
        message, code = _details(exception), "bad_request"
    return _answer(request, status, message, code, dict(exception.headers or {}), _parameter(exception))


def _parameter(exception: HTTPException) -> str | None:
    """The first parameter that Litestar found at fault."""
    extra = exception.extra if isinstance(exception.extra, list) else []
    return next((str(fault["key"]) for fault in extra if isinstance(fault, dict) and "key" in fault), None)


def _details(exception: HTTPException) -> str:
    """What is wrong, with the parameters that Litestar found at fault."""
    extra = exception.extra if isinstance(exception.extra, list) else []
    faults = [f"{fault.get('key')}: {fault.get('message')}" for fault in extra if isinstance(fault, dict)]
    return "; ".join(faults) or exception.detail or HTTPStatus(exception.status_code).phrase


def _invalid_report(request: AnyRequest, fault: InvalidReport) -> Response[bytes]:
    message = str(fault) if fault.parameter in str(fault) else f"{fault.parameter}: {fault}"
    status, code = (404, "not_found") if isinstance(fault, NotFound) else (400, "bad_request")
    return _answer(request, status, message, code, {}, fault.parameter)


def _configuration_error(request: AnyRequest, fault: ConfigurationError) -> Response[bytes]:
    """A change that cannot be made: by whom, of what, in which state, or as it was asked for."""
    if isinstance(fault, VersionConflict):
        headers = {} if fault.found is None else {"etag": f'"{fault.found}"'}
        message = (
            f"The {fault.kind} {fault.target!r} is not as 'if-match' says; 'etag' tells its present state. Read it "
            "again and repeat the change."
        )
        return _answer(request, 412, message, "precondition_failed", headers)
    status = next((status for kind, status in _STATUSES if isinstance(fault, kind)), 400)
    message = str(fault)
    if isinstance(fault, InvalidField):
        return _answer(request, status, f"{message}.", None, {}, fault.field)
    begins_with_field = "_" in message.partition(" ")[0]
    sentence = message if begins_with_field else f"{message[:1].upper()}{message[1:]}"
    return _answer(request, status, f"{sentence}.", None, {})


def _services_away(request: AnyRequest, fault: Exception) -> Response[bytes]:
    message = "The gateway cannot reach its own services at the moment. Try again shortly."
    return _answer(request, 503, message, "service_unavailable", {"retry-after": "1"})


def _bad_cursor(request: AnyRequest, fault: BadCursor) -> Response[bytes]:
    message = str(fault)
    return _answer(request, 400, f"{message[:1].upper()}{message[1:]}.", "bad_request", {}, "cursor")


def _no_cache_redis(request: AnyRequest, fault: NoCacheRedis) -> Response[bytes]:
    return _answer(request, 503, str(fault), "not_configured", {})


def _unknown_master_key(request: AnyRequest, fault: UnknownMasterKey) -> Response[bytes]:
    _log.error("unknown_master_key", path=request.url.path, error=str(fault))
    message = (
        "What is asked for is sealed by a master key that this gateway lacks. The operator sets it as "
        "PENSTOCK_PREVIOUS_MASTER_KEY, and runs `penstock prompts rewrap`."
    )
    return _answer(request, 503, message, "not_configured", {})


def _crashed(request: AnyRequest, exception: Exception) -> Response[bytes]:
    request_id = str(uuid7())
    _log.error("request_crashed", request_id=request_id, path=request.url.path, exc_info=exception)
    error = server_error(f"The gateway failed. The operator finds the cause under request id {request_id}.")
    return _answer(request, 500, error.body.message, error.body.code, {"x-request-id": request_id})


_STATUSES: Final[tuple[tuple[type[ConfigurationError], int], ...]] = (
    (NotAllowed, 403),
    (Unknown, 404),
    (AlreadyExists, 409),
    (StateConflict, 409),
)
EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    ApiError: _api_error,
    Problem: _problem,
    InvalidReport: _invalid_report,
    ConfigurationError: _configuration_error,
    HTTPException: _http_exception,
    DatabaseUnavailable: _services_away,
    RedisUnavailable: _services_away,
    BadCursor: _bad_cursor,
    NoCacheRedis: _no_cache_redis,
    UnknownMasterKey: _unknown_master_key,
    RegistryUnavailable: _services_away,
    Exception: _crashed,
}
