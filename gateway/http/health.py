"""``/healthz``: this process runs. ``/readyz``: it can serve, with a word on each thing it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

CHECK_TIMEOUT_S = 2.0

Check = Callable[[], Awaitable[None]]
"""Returns if all is well, raises if not."""


def health_handlers(
    checks: Mapping[str, Check], backends: Callable[[], int], *, needs_backend: bool
) -> list[HTTPRouteHandler]:
    """``backends``: how many workers take requests."""

    @get("/healthz", operation_id="health", summary="Whether the process runs", tags=["Operations"], security=[{}])
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @get(
        "/readyz",
        operation_id="readiness",
        summary="Whether requests can be served",
        tags=["Operations"],
        security=[{}],
    )
    async def readyz() -> Response[bytes]:
        passed = await asyncio.gather(*(_passes(check) for check in checks.values()))
        alive = backends()
        ready = all(passed) and (alive > 0 or not needs_backend)
        state: dict[str, Any] = {"status": "ready" if ready else "unready"}
        state |= {name: "ok" if well else "unavailable" for name, well in zip(checks, passed, strict=True)}
        state["backends"] = alive
        return Response(msgspec.json.encode(state), status_code=200 if ready else 503, media_type="application/json")

    return [healthz, readyz]


async def _passes(check: Check) -> bool:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await check()
    except Exception:  # whatever it is, the service cannot be used now, and that is the whole answer
        return False
    return True
