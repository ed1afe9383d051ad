"""What is seen to before a handler of Litestar's runs: parameters that it has, and a body that came whole."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request
from litestar.handlers.base import BaseRouteHandler

from gateway.http.errors import Problem

AnyRequest = Request[Any, Any, Any]
_OURS = frozenset({"request", "data", "if_match"})
"""Names in a handler's signature that are no parameters of the query."""


async def check_input(request: AnyRequest, handler: BaseRouteHandler, body_timeout_s: float) -> None:
    """Raises Problem (400, 408, 415): a parameter that would do nothing, a body that is no JSON or does not come."""
    parameters = handler.parsed_fn_signature.parameters
    known = [name for name in _named(handler) if name not in _OURS and name not in request.path_params]
    for name in request.query_params:
        if name not in known:
            has = f"there are {', '.join(known)}" if known else "there are none"
            raise Problem(400, f"There is no parameter {name[:100]!r} here; {has}.", field=name[:100])
    if "data" in parameters:
        await _receive_body(request, body_timeout_s)


def _named(handler: BaseRouteHandler) -> list[str]:
    """Parameters of the handler, and of what it depends on."""
    provided = handler.resolve_dependencies()
    return [
        name
        for own in handler.parsed_fn_signature.parameters
        for name in (provided[own].parsed_fn_signature.parameters if own in provided else [own])
    ]


async def _receive_body(request: AnyRequest, within_s: float) -> None:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise Problem(415, "Send the body as JSON, with 'content-type: application/json'.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "Send the body without 'content-encoding'.")
    try:
        async with asyncio.timeout(within_s):
            body = await request.body()
    except TimeoutError:
        raise Problem(408, f"The body did not arrive within {within_s:g} s. Send the request again.") from None
    if not body:
        raise Problem(400, "The body is empty. Send a JSON object.")
