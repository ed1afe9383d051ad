"""Errors of servers that are compatible with OpenAI's API, as an answer's status and body or as an event in a stream.

They come in several shapes::

    {"error": {"message", "type", "param", "code"}}          OpenAI, vLLM, llama.cpp (whose code is the HTTP status)
    {"object": "error", "message", "type", "param", "code"}  SGLang, TensorRT-LLM, older vLLM
    {"error": "text"}                                        vLLM's and SGLang's missing key; Ollama's own API
    [{"error": {"code", "message", "status"}}]               Google
    {"detail": "text"}, {"detail": [{"loc", "msg"}]}         FastAPI before a server's own handlers

Reference: https://platform.openai.com/docs/guides/error-codes; the stand-ins of the tests say where each is from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from gateway.backends.faults import BackendError, BackendFault
from gateway.backends.lenient_json import decoded
from gateway.backends.masking import masked
from gateway.backends.retry_after import for_clients, retry_after_s
from worker.protocol.errors import ErrorBody, ErrorEnvelope

LONGEST_BODY = 64 * 1024
LONGEST_MESSAGE = 4096
WORTH_ANOTHER_TRY = frozenset({408, 429})
NO_ACCESS = frozenset({401, 402, 403, 407})
"""The backend does not take our key, or it is not paid for."""
_OF_THE_KEY = frozenset({401, 402})
"""Those that a backend may also tell by name under another status."""
NOT_THERE = frozenset({404, 405})
"""The backend has no such model, or its address is wrong."""
_THE_REQUESTS = frozenset({400, 413, 422})
"""Those that speak of the request also where they are in no shape of OpenAI's."""

STATUS_BY_NAME: Final[Mapping[str, int]] = {
    name: status
    for status, names in {
        400: "invalid_request_error bad_request badrequesterror context_length_exceeded exceed_context_size_error "
        "invalid_argument failed_precondition content_policy_violation invalid_prompt",
        401: "invalid_api_key authentication_error unauthenticated api_key_invalid",
        402: "insufficient_quota billing_hard_limit_reached billing_not_active payment_required",
        403: "permission_error permission_denied forbidden",
        404: "model_not_found not_found_error notfounderror not_found",
        429: "rate_limit_exceeded rate_limit_error resource_exhausted too_many_requests toomanyrequests",
        503: "engine_overloaded worker_stopping overloaded_error unavailable unavailable_error "
        "service_unavailable serviceunavailableerror server_overloaded",
        504: "deadline_exceeded timeout timeout_error",
    }.items()
    for name in names.split()
}
"""What a ``code``, ``type`` or ``status`` that is a word says; a repetition in a moment may well not meet a 503."""
_LIKE_A_SECRET = re.compile(
    rb"\b(?:sk-[A-Za-z0-9*_-]{8,}|(?:org-|proj_|AIza|hf_|nvapi-)[A-Za-z0-9*_-]{16,})",
)
_UNCLEAN = re.compile(r"[^A-Za-z0-9_.:-]+")


@dataclass(frozen=True, slots=True)
class Told:
    """What a backend says went wrong."""

    message: str | None
    type: str | None = None
    param: str | None = None
    code: str | None = None
    status: int | None = None
    """The HTTP status that it names or means."""
    body: bytes | None = None
    """The error in OpenAI's shape, if it came so."""


def error_of_event(data: bytes, *, named: bool = False, secrets: Iterable[str] = ()) -> BackendFault | None:
    """The fault that an event, or the body of an answer of status 200, tells, if it tells one.

    ``named``: the event calls itself an error, so any words may tell it.
    """
    told = _told(data, refused=named)
    if told is None:
        return None
    status = told.status or 502
    return _fault(status, told, "1" if status == 503 else None, None, elsewhere=True, secrets=secrets)


def refusal(
    status: int,
    body: bytes | None,
    retry_after: str | None,
    *,
    now: datetime | None = None,
    elsewhere: bool = True,
    secrets: Iterable[str] = (),
) -> BackendFault:
    """What an answer with a status other than 200 means.

    ``now``: what a date in ``retry_after`` is measured from. ``elsewhere``: whether another backend may take what this
    one refuses the gateway itself. ``secrets``: what must not be passed on, though the backend may repeat it.
    """
    told = _told(body, refused=True) if body else None
    after_s = retry_after_s(retry_after, now or datetime.now(UTC))
    if told is not None and told.status in _OF_THE_KEY and 400 <= status < 500:
        # Google calls a wrong key a bad request, OpenAI a lack of credit too many requests.
        status = told.status
    shown = 400 <= status < 500 or status == 503
    if shown and told is not None and (told.body is not None or status in _THE_REQUESTS or status == 429):
        return _fault(status, told, for_clients(retry_after), after_s, elsewhere=elsewhere, secrets=secrets)
    return _unreadable(status, after_s, elsewhere=elsewhere, told=told is not None)


def _fault(
    status: int,
    told: Told,
    retry_after: str | None,
    after_s: float | None,
    *,
    elsewhere: bool,
    secrets: Iterable[str],
) -> BackendFault:
    if status in NO_ACCESS or status in NOT_THERE or status == 408:
        return _unreadable(status, after_s, elsewhere=elsewhere, told=True)
    secrets = list(secrets)
    message, kind, param, code = (
        None if text is None else _masked(text.encode(), secrets).decode()
        for text in (told.message, told.type, told.param, told.code)
    )
    body = ErrorBody(
        message or "The backend failed.",
        kind or ("server_error" if status >= 500 else "invalid_request_error"),
        param,
        code,
    )
    raw = msgspec.json.encode(ErrorEnvelope(body)) if told.body is None else _masked(told.body, secrets)
    return BackendError(
        status,
        raw,
        code=_name(code or kind),
        retryable=status >= 500 or status in WORTH_ANOTHER_TRY,
        retry_after=retry_after,
        told=body,
        unhealthy=status >= 500,
        retry_after_s=after_s,
    )


def _name(word: str | None) -> str:
    """For the usage row: printable, without spaces."""
    return _UNCLEAN.sub("_", word or "")[:64].strip("_") or "backend_error"


def _unreadable(status: int, after_s: float | None, *, elsewhere: bool, told: bool) -> BackendFault:
    """What the client cannot be shown. ``told``: it came from the server itself, not from some wall before it."""
    if status in NO_ACCESS:
        return BackendFault(
            "backend_unauthorized",
            "The model's backend refused the gateway's own credentials. Your key is not at fault; tell the operator.",
            retryable=elsewhere,
            unhealthy=told or status != 403,
        )
    if status in NOT_THERE:
        return BackendFault(
            "backend_not_found",
            "The backend does not know the model or the address that the gateway asked it for. Tell the operator.",
            retryable=elsewhere,
        )
    if status in (408, 504):
        return BackendFault("backend_timeout", "The backend took too long. Send the request again.", status=504)
    if status in (429, 503):
        return BackendFault(
            "engine_overloaded",
            "The workers are busy. Try again shortly.",
            status=503,
            unhealthy=status == 503,
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
        f"The worker failed with status {status}. Send the request again; if it persists, tell the operator.",
        retryable=status >= 500 or (elsewhere and status < 400),
        unhealthy=not 400 <= status < 500,
    )


def _told(body: bytes, *, refused: bool) -> Told | None:
    """``refused``: it is known already that this is an error, so any words may tell it."""
    value = decoded(body)
    if value is None:
        return _plain(body) if refused else None
    whole = body if isinstance(value, dict) else None
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    if isinstance(error, dict) and any(part is not None for part in error.values()):
        return _of_fields(error, body=whole if refused or len(value) == 1 else None)
    if isinstance(error, str) and error:
        return Told(_clean(error), status=STATUS_BY_NAME.get(error.lower()))
    if value.get("object") == "error" or (refused and isinstance(value.get("message"), str)):
        return _of_fields(value, body=None)
    if refused and "detail" in value:
        return Told(_clean(_detail(value["detail"])))
    return None


def _of_fields(error: dict[str, Any], *, body: bytes | None) -> Told:
    message, kind, param, code = (error.get(name) for name in ("message", "type", "param", "code"))
    words = [word for word in (code, kind, error.get("status"), *_reasons(error)) if isinstance(word, str)]
    meant = [found for word in words if (found := STATUS_BY_NAME.get(word.lower())) is not None]
    by_name = next((found for found in meant if found in _OF_THE_KEY), meant[0] if meant else None)
    number = int(code) if isinstance(code, str) and re.fullmatch(r"[45][0-9]{2}", code) else code
    status = number if type(number) is int and 400 <= number < 600 else None
    if by_name in _OF_THE_KEY or status is None:
        status = by_name
    exact = body is not None and isinstance(message, str) and len(body) <= LONGEST_BODY
    return Told(
        _clean(message),
        _clean(kind, most=256) or None,
        _clean(param, most=256),
        _clean(code, most=256) or None,
        status,
        body if exact else None,
    )


def _reasons(error: dict[str, Any]) -> list[object]:
    """Google's machine-readable reasons, as ``API_KEY_INVALID``.

    Reference: https://cloud.google.com/apis/design/errors#error_info
    """
    details = error.get("details")
    return [each.get("reason") for each in details if isinstance(each, dict)] if isinstance(details, list) else []


def _detail(detail: object) -> str | None:
    if isinstance(detail, str):
        return detail
    if not isinstance(detail, list):
        return None
    told = []
    for each in detail[:10]:
        if isinstance(each, dict) and isinstance(each.get("msg"), str):
            place = each.get("loc")
            where = ".".join(str(part) for part in place if part != "body") if isinstance(place, list) else ""
            told.append(f"{where}: {each['msg']}" if where else each["msg"])
    return "; ".join(told) or None


def _clean(text: object, *, most: int = LONGEST_MESSAGE) -> str | None:
    """Text that can be encoded; None for what is none."""
    return text[:most].encode(errors="replace").decode() if isinstance(text, str) else None


def _plain(body: bytes) -> Told | None:
    """Plain words; a page is none."""
    text = body.decode(errors="replace").strip()
    if not text or len(text) > LONGEST_MESSAGE or text.startswith(("<", "{", "[")) or not text.isprintable():
        return None
    return Told(text)


def _masked(body: bytes, secrets: Iterable[str]) -> bytes:
    return _LIKE_A_SECRET.sub(b"***", masked(body, secrets))
