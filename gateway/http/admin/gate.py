"""What every request of the admin API passes before its handler: key, role, parameters, body."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.types import AsyncAnyCallable

from gateway.http.admin.auth import authenticate
from gateway.http.errors import Problem
from gateway.tenants.audit import Actor
from gateway.tenants.principal import AdminRole
from gateway.tenants.service import AdminPrincipal, Tenants

MAX_BODY_BYTES = 256 * 1024
AnyRequest = Request[Any, Any, Any]
_OURS = frozenset({"request", "data", "if_match"})
"""Names in a handler's signature that are no parameters of the query."""


def gate(tenants: Tenants, *, body_timeout_s: float) -> AsyncAnyCallable:
    """A guard that lets administrators pass whose role is the handler's ``role`` or more (a viewer's, if it names
    none). Nothing of the body is looked at before. Raises Problem (400, 401, 403, 408, 415), DatabaseUnavailable."""

    async def check(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        request = cast("AnyRequest", connection)
        role: AdminRole = handler.opt.get("role", "viewer")
        request.state.admin = await authenticate(tenants, request, role)
        parameters = handler.parsed_fn_signature.parameters
        known = [name for name in parameters if name not in _OURS and name not in request.path_params]
        for name in request.query_params:
            if name not in known:
                has = f"there are {', '.join(known)}" if known else "there are none"
                raise Problem(400, f"There is no parameter {name[:100]!r} here; {has}.", field=name[:100])
        if "data" in parameters:
            await _receive_body(request, body_timeout_s)

    return check


def admin_of(request: AnyRequest) -> AdminPrincipal:
    """Whom the gate let pass."""
    admin: AdminPrincipal = request.state.admin
    return admin


def actor_of(request: AnyRequest) -> Actor:
    """As whom they change things."""
    admin = admin_of(request)
    return Actor(admin.key_id, admin.role)


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
