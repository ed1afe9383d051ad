"""``GET /whoami``: whose key this is."""

from __future__ import annotations

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler

from gateway.http.admin.gate import AnyRequest, admin_of
from gateway.http.admin.resource import documented
from gateway.tenants.principal import AdminRole


class Caller(msgspec.Struct, frozen=True):
    key_id: str
    """Public id of the key: the audit log names it as the actor."""
    name: str
    role: AdminRole


def whoami_handlers() -> list[HTTPRouteHandler]:
    @get("/whoami", operation_id="whoAmI", operation_class=documented(), summary="Tell whose key this is")
    async def whoami(request: AnyRequest) -> Caller:
        admin = admin_of(request)
        return Caller(admin.key_id, admin.name, admin.role)

    return [whoami]
