"""Who calls the admin API, and whether their role allows what they want."""

from __future__ import annotations

from typing import Any, Final

from litestar import Request

from gateway.http.client import bearer
from gateway.http.errors import Problem
from gateway.tenants.audit import Actor
from gateway.tenants.principal import AdminRole
from gateway.tenants.records import InvalidKey
from gateway.tenants.service import AdminPrincipal, Tenants

_RANK: Final[dict[AdminRole, int]] = {"viewer": 0, "admin": 1, "owner": 2}


async def require_admin(tenants: Tenants, request: Request[Any, Any, Any], role: AdminRole = "viewer") -> Actor:
    """The caller, who has ``role`` or more. Raises Problem (401, 403), DatabaseUnavailable."""
    principal = await authenticate(tenants, request, role)
    return Actor(principal.key_id, principal.role)


async def authenticate(tenants: Tenants, request: Request[Any, Any, Any], role: AdminRole) -> AdminPrincipal:
    """As ``require_admin``."""
    try:
        principal = await tenants.authenticate_admin(bearer(request.headers.get("authorization")))
    except InvalidKey:
        raise Problem(
            401, "Send an administrator's key as a bearer token.", headers={"www-authenticate": "Bearer"}
        ) from None
    if _RANK[principal.role] < _RANK[role]:
        raise Problem(
            403, f"This key has the role {principal.role!r}. Use the key of an administrator who is {role!r}."
        )
    return principal
