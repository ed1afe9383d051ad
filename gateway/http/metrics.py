"""``GET /metrics``: what Prometheus scrapes.

With a ``metrics_token`` it wants it as a bearer token; without, it answers only to callers on this machine that come
through no proxy, as far as a proxy lets itself be known.
"""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.http.client import bearer
from gateway.http.errors import Problem
from gateway.observability.metrics import CONTENT_TYPE, Metrics

_OF_PROXIES = ("forwarded", "via", "x-real-ip", "x-request-start", "x-original-host", "x-client-ip", "true-client-ip")
_PREFIXES_OF_PROXIES = ("x-forwarded-", "cf-", "x-envoy-", "x-amzn-", "x-azure-")


def metrics_handler(metrics: Metrics, *, token: str | None) -> HTTPRouteHandler:
    @get(
        "/metrics",
        media_type="text/plain",
        operation_id="metrics",
        summary="Metrics in Prometheus' text format",
        tags=["Operations"],
        security=[{}],
    )
    async def scrape(request: Request[Any, Any, Any]) -> Response[bytes]:
        if token is not None:
            given = bearer(request.headers.get("authorization")) or ""
            if not hmac.compare_digest(given.encode(), token.encode()):
                raise Problem(
                    401, "Send PENSTOCK_METRICS_TOKEN as a bearer token.", headers={"www-authenticate": "Bearer"}
                )
        elif not _is_local(request):
            raise Problem(
                403, "Set PENSTOCK_METRICS_TOKEN and send it as a bearer token to read metrics from another machine."
            )
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return scrape


def _is_local(request: Request[Any, Any, Any]) -> bool:
    names = request.headers.keys()
    if request.client is None or any(name in _OF_PROXIES or name.startswith(_PREFIXES_OF_PROXIES) for name in names):
        return False
    try:
        return ip_address(request.client.host).is_loopback
    except ValueError:
        return False
