"""What every request of the admin API passes before its handler: key, role, parameters, body."""

from __future__ import annotations

from typing import Any, cast

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.types import AsyncAnyCallable

from gateway.http.admin.auth import authenticate
from gateway.http.handler_input import AnyRequest, check_input
from gateway.tenants.audit import Actor
from gateway.tenants.principal import AdminRole
from gateway.tenants.service import AdminPrincipal, Tenants

__all__ = ["MAX_BODY_BYTES", "AnyRequest", "actor_of", "admin_of", "gate"]

MAX_BODY_BYTES = 256 * 1024


def gate(tenants: Tenants, *, body_timeout_s: float) -> AsyncAnyCallable:
    """A guard that lets administrators pass whose role is the handler's ``role`` or more (a viewer's, if it names
    none). Nothing of the body is looked at before. Raises Problem (400, 401, 403, 408, 415), DatabaseUnavailable."""

    async def check(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        request = cast("AnyRequest", connection)
        role: AdminRole = handler.opt.get("role", "viewer")
        request.state.admin = await authenticate(tenants, request, role)
        await check_input(request, handler, body_timeout_s)

    return check


def admin_of(request: AnyRequest) -> AdminPrincipal:
    """Whom the gate let pass."""
    admin: AdminPrincipal = request.state.admin
    return admin


def actor_of(request: AnyRequest) -> Actor:
    """As whom they change things."""
    admin = admin_of(request)
    return Actor(admin.key_id, admin.role)
