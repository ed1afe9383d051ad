"""``/admin/v1``: all resources of the admin API behind one gate."""

from __future__ import annotations

from litestar import Router
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.administration.caches import CacheAdministration
from gateway.administration.prompts import PromptAdministration
from gateway.backends.trial import Trials
from gateway.billing.dead import DeadEvents
from gateway.billing.prices import PriceBook
from gateway.http.admin.admin_keys import admin_key_handlers
from gateway.http.admin.alerts import alert_handlers
from gateway.http.admin.audit import audit_handlers
from gateway.http.admin.backends import backend_handlers
from gateway.http.admin.cache import cache_handlers
from gateway.http.admin.dead_events import dead_event_handlers
from gateway.http.admin.gate import MAX_BODY_BYTES, gate
from gateway.http.admin.keys import key_handlers
from gateway.http.admin.limits import limit_handlers
from gateway.http.admin.pools import pool_handlers
from gateway.http.admin.prices import price_handlers
from gateway.http.admin.projects import project_handlers
from gateway.http.admin.prompts import prompt_handlers
from gateway.http.admin.refusals import refusal_handlers
from gateway.http.admin.resource import PREFIX
from gateway.http.admin.routes import route_handlers
from gateway.http.admin.tenants import tenant_handlers
from gateway.http.admin.whoami import whoami_handlers
from gateway.tenants.backend_changes import BackendChanges
from gateway.tenants.catalog import Catalog
from gateway.tenants.directory import Directory
from gateway.tenants.service import Tenants


def admin_router(
    *,
    tenants: Tenants,
    directory: Directory,
    catalog: Catalog,
    backends: BackendChanges,
    trials: Trials,
    prices: PriceBook,
    dead: DeadEvents,
    engine: AsyncEngine,
    body_timeout_s: float,
    prompts: PromptAdministration,
    caches: CacheAdministration,
) -> Router:
    """``engine``: for what is only read."""
    return Router(
        PREFIX,
        route_handlers=[
            *whoami_handlers(),
            *tenant_handlers(directory),
            *project_handlers(directory),
            *key_handlers(directory),
            *limit_handlers(directory),
            *admin_key_handlers(directory),
            *pool_handlers(catalog),
            *backend_handlers(backends, trials),
            *route_handlers(catalog),
            *price_handlers(prices),
            *audit_handlers(directory),
            *dead_event_handlers(dead),
            *refusal_handlers(engine),
            *alert_handlers(engine),
            *prompt_handlers(prompts),
            *cache_handlers(caches),
        ],
        guards=[gate(tenants, body_timeout_s=body_timeout_s)],
        request_max_body_size=MAX_BODY_BYTES,
        security=[{"admin_key": []}],
        tags=["Administration"],
    )
