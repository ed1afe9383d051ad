"""How those that are not served are told why, and what would help."""

from __future__ import annotations

import math

from gateway.admission.errors import Refused
from gateway.admission.ticket import Bound
from gateway.billing.usage import usd_text
from worker.protocol.errors import ApiError, server_error, unauthorized

_WHOSE = {
    "tenant": "your organisation",
    "project": "this project",
    "key": "this API key",
    "end_user": "this end user",
    "model": "your organisation's use of this model",
}
_RAISED = "have the limit raised by your administrator"
_EACH = {"day": "daily", "week": "weekly", "month": "monthly", "total": "total"}
_NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's SDKs repeat every 429 but one that says so."""


def invalid_key(key: str | None) -> ApiError:
    if not key:
        return unauthorized("No API key. Send it as 'authorization: Bearer <key>'.")
    return unauthorized("The API key is not valid. Check it, or ask your administrator for another.")


def out_of_scope() -> ApiError:
    return ApiError(
        403,
        "This API key may not run models. Use a key with the scope 'inference'.",
        type="permission_error",
        code="insufficient_scope",
    )


def not_priced(route: str) -> ApiError:
    return server_error(
        f"The model {route!r} has no price, so it is not served. Ask the operator to set one.",
        status=503,
        code="model_not_priced",
    )


def unavailable(retry_after_s: float = 1.0) -> ApiError:
    return ApiError(
        503,
        "The gateway cannot reach its own services at the moment. Try again shortly.",
        type="server_error",
        code="service_unavailable",
        headers={"retry-after": _whole_seconds(retry_after_s)},
    )


def over_limit(refused: Refused, bound: Bound) -> ApiError:
    """``bound``: what the request wanted to reserve.

    ``rate_limit_exceeded`` where time or other requests' ends help, ``insufficient_quota`` for money, as OpenAI has it.
    """
    headers = dict(refused.headers)
    if refused.retry_after_s is not None:
        headers["retry-after"] = _whole_seconds(refused.retry_after_s)
    if refused.retry_after_s is None or refused.reason == "budget":
        headers |= _NO_RETRY
    message = " ".join(_explained(refused, bound))
    if refused.reason == "budget":
        return ApiError(429, message, type="insufficient_quota", code="insufficient_quota", headers=headers)
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def _explained(refused: Refused, bound: Bound) -> tuple[str, str]:
    """Which limit stands against the request, and the remedy."""
    whose = _WHOSE[refused.subject]
    if refused.reason == "budget":
        window = _EACH.get(refused.window or "", "")
        stands = f"The {window} budget of {whose} does not allow this request, which may cost up to {_usd(bound)} USD."
        later = "wait for the next period, " if refused.retry_after_s is not None else ""
        return stands, f"Ask for less output, {later}or have the budget raised."
    if refused.reason == "concurrent":
        stands = f"Over the limit of {refused.limit} requests at a time of {whose}."
        return stands, f"Wait until one of them has ended, or {_RAISED}." if refused.limit else _raised_alone()
    stands = f"Over the limit of {refused.limit} {refused.reason} per {refused.window} of {whose}."
    if refused.reason == "tokens":
        stands += f" This request may take up to {bound.tokens}, of which {max(refused.remaining, 0)} are left."
    if refused.retry_after_s is not None:
        return stands, "Wait as 'retry-after' says."
    if refused.reason == "tokens" and refused.limit:
        return stands, f"It never fits: shorten the messages, ask for less output ('max_tokens'), or {_RAISED}."
    return stands, _raised_alone()


def _raised_alone() -> str:
    return f"Waiting does not help: {_RAISED}."


def _usd(bound: Bound) -> str:
    whole, _, fraction = usd_text(bound.nano_usd).partition(".")
    return f"{whole}.{fraction.rstrip('0').ljust(2, '0')}"


def _whole_seconds(seconds: float) -> str:
    return str(max(1, math.ceil(seconds)))
