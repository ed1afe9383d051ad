"""A tenant's key at the doors that show what is the tenant's own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.types import AsyncAnyCallable

from gateway.http.client import bearer
from gateway.http.handler_input import AnyRequest, check_input
from gateway.tenants.principal import Principal
from gateway.tenants.records import InvalidKey
from gateway.tenants.service import Tenants
from worker.protocol.errors import ApiError, unauthorized


async def authorized(tenants: Tenants, request: AnyRequest, scopes: Collection[str], deed: str) -> Principal:
    """The caller, whose key has one of ``scopes``. ``deed``: what else it may not do, as "read usage".

    Raises ApiError (401, 403), DatabaseUnavailable.
    """
    key = bearer(request.headers.get("authorization"))
    try:
        principal = await tenants.authenticate(key)
    except InvalidKey:
        if not key:
            raise unauthorized("No API key. Send it as 'authorization: Bearer <key>'.") from None
        raise unauthorized("The API key is not valid. Check it, or ask your administrator for another.") from None
    if principal.scopes.isdisjoint(scopes):
        names = " or ".join(f"'{scope}'" for scope in scopes)
        raise ApiError(
            403,
            f"This API key may not {deed}. Use a key with the scope {names}.",
            type="permission_error",
            code="insufficient_scope",
        )
    return principal


def tenant_gate(tenants: Tenants, *, body_timeout_s: float) -> AsyncAnyCallable:
    """A guard that lets keys pass that have one of the handler's ``scopes``; its ``deed`` says what it does. Nothing
    of the body is looked at before. Raises ApiError (401, 403), Problem (400, 408, 415), DatabaseUnavailable."""

    async def check(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        request = cast("AnyRequest", connection)
        principal = await authorized(tenants, request, handler.opt["scopes"], handler.opt["deed"])
        request.state.principal = principal
        await check_input(request, handler, body_timeout_s)

    return check


def principal_of(request: AnyRequest) -> Principal:
    """Whom the gate let pass."""
    principal: Principal = request.state.principal
    return principal
